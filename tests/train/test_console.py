"""The table of steps, as text."""

import dataclasses
import io
import re
from collections.abc import Iterable

import pytest
from rich.console import Console

from longspan.train import console as console_module
from longspan.train.console import StepTable
from longspan.train.metrics import EvaluationRecord, StepRecord
from tests.train.test_metrics import EVALUATION, RECORD


def printed(
    records: Iterable[StepRecord | EvaluationRecord], total: int, log_every: int = 1, terminal: bool = False
) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with StepTable(total, log_every, console) as table:
        for record in records:
            table.write(record)
    return stream.getvalue()


def steps(*numbers: int, **changes: float) -> list[StepRecord]:
    return [dataclasses.replace(RECORD, step=number, **changes) for number in numbers]


def test_columns_are_aligned_under_their_headers() -> None:
    header, row = printed(steps(1), total=1).splitlines()
    assert " ".join(header.split()) == "step loss |gradient| lr tokens/s GFLOP/s wait peak MiB left"
    for name, value in [("step", "1"), ("loss", "2.5000"), ("tokens/s", "16,384"), ("peak MiB", "3")]:
        assert row[: header.index(name) + len(name)].endswith(value)
    assert row[: header.index("wait") + len("wait")].endswith("10%")


def test_lines_are_thinned_but_first_and_last_step_and_evaluations_stay() -> None:
    records = [dataclasses.replace(EVALUATION, step=0), *steps(1, 2, 3, 4), EVALUATION, *steps(5, 6, 7)]
    lines = printed(records, total=7, log_every=5).splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == [0, 1, 4, 5, 7]


def test_an_evaluation_is_one_line_under_the_same_headers() -> None:
    header, line = printed([EVALUATION], total=9).splitlines()
    words = "4 2.2500 held out; by position 0-63 2.750, 64- 1.750; by document length 64- 2.250"
    assert " ".join(line.split()) == words
    for name, value in [("step", "4"), ("loss", "2.2500")]:
        assert line[: header.index(name) + len(name)].endswith(value)


def test_time_left_follows_the_pace_without_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(clock))
    lines = printed(steps(1, 2, 3), total=363).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["1:00:10", "1:00:00"]


def test_broken_step_is_shown_as_it_is() -> None:
    assert "nan" in printed(steps(1, loss=float("nan")), total=1)


def test_terminal_also_gets_a_bar() -> None:
    text = printed(steps(1, 2), total=4, terminal=True)
    assert re.search(r"training.*2/4 steps.*left", text)
    assert "training" not in printed(steps(1, 2), total=4)
