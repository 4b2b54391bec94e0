"""SIGTERM ends a run after a step, on all ranks alike, with everything saved and exit code 0."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from longspan.train.checkpoint.folder import complete
from tests.failures.commands import Ended, fault, faulty
from tests.failures.test_ends import END_S, TWO, steps
from tests.verify.runs import write_run

ENDLESS = ("--train.steps", "1000000", "--train.eval_every", "0")
PAIR = ("--layout.cp", "2", *ENDLESS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def lines(run: Path) -> int:
    records = run.parent / "out" / "steps.jsonl"
    return records.read_text().count("\n") if records.exists() else 0


def ask(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def ask_the_whole_group(pid: int) -> None:
    """As schedulers do; the ranks then get the signal from the launcher too."""
    os.killpg(pid, signal.SIGTERM)


def ask_twice(pid: int) -> None:
    ask(pid)
    time.sleep(2)
    ask(pid)


def stopped(run: Path, ended: Ended) -> dict[str, Any]:
    """The result of a run that stopped in order: saved after its last step, in as many words."""
    result = json.loads(ended.out)
    assert (ended.err, result["stopped"]) == ("", "SIGTERM")
    assert steps(run) == [*range(1, result["last_step"] + 1)]
    newest = next(reversed(complete(run.parent / "out" / "checkpoints").items()))
    assert newest == (result["last_step"], Path(result["checkpoint"]))
    assert (run.parent / "out" / "weights" / "config.json").exists()
    return result


@pytest.mark.parametrize(
    ("words", "act"),
    [(ENDLESS, ask), (PAIR, ask_the_whole_group), pytest.param(PAIR, ask, marks=pytest.mark.grid)],
    ids=["alone", "group", "launcher"],
)
def test_a_run_that_is_asked_to_stop_saves_and_ends_well(run: Path, words: tuple[str, ...], act: Any) -> None:
    ended = faulty(run, words=words, when=lambda: lines(run) > 3, act=act)
    assert ended.code == 0, ended.err
    assert ended.seconds < END_S
    assert stopped(run, ended)["last_step"] >= 3


def test_one_rank_that_is_asked_stops_all_after_the_same_step(run: Path) -> None:
    ended = faulty(run, fault("is_asked_to_stop", rank=1), words=TWO)
    assert ended.code == 0, ended.err
    assert stopped(run, ended)["last_step"] == 3
    # It goes on from there, to the end that it would have had.
    again = faulty(run, words=(*TWO, "--resume"))
    assert json.loads(again.out)["stopped"] is None
    assert steps(run) == [1, 2, 3, 4, 5, 6]


@pytest.mark.grid
def test_under_torchrun_the_ranks_save_too(run: Path) -> None:
    ended = faulty(run, words=PAIR, ranks=2, when=lambda: lines(run) > 3, act=ask)
    result = json.loads(ended.out)
    assert result["stopped"] == "SIGTERM"
    assert "longspan:" not in ended.err
    assert next(reversed(complete(run.parent / "out" / "checkpoints"))) == result["last_step"]


@pytest.mark.grid
def test_a_second_signal_ends_a_run_that_cannot_stop(run: Path) -> None:
    ended = faulty(
        run,
        fault("spins", rank=1),
        words=PAIR,
        when=lambda: (run.parent / "fault").exists(),
        act=ask_twice,
    )
    assert (ended.code, ended.out, ended.err) == (143, "", "")
    assert ended.seconds < END_S


@pytest.mark.grid
def test_a_run_that_has_not_begun_ends_at_once(run: Path) -> None:
    begun = time.monotonic()
    ended = faulty(run, words=PAIR, when=lambda: time.monotonic() - begun > 2, act=ask)
    assert (ended.code in (143, -signal.SIGTERM), ended.out) == (True, "")
    assert ended.seconds < END_S
