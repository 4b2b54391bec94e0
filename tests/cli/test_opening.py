"""What a run says before its first step."""

import io
import re
from pathlib import Path

from rich.console import Console

from longspan.cli.opening import show_opening
from longspan.data import unigram_entropy
from longspan.spec.layout import Layout
from longspan.spec.run import RunConfig
from longspan.train.groups import Groups
from longspan.train.session import Session
from tests.verify.runs import RUN, write_run

STAGES = """
[[stages]]
sequence = 60
steps = 2
[[stages]]
sequence = 240
steps = 1000
global_batch = 1
"""


def opened(run: Path, cp: int = 1) -> Session:
    """A session that believes in cp ranks; nothing is sent before the first step."""
    return Session.open(RunConfig.load(run), Groups(Layout(cp_inner=cp), 0, "cpu"))


def opening(session: Session) -> list[str]:
    stream = io.StringIO()
    show_opening(session, Console(file=stream, width=160))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_a_plain_run_says_how_it_shares_attention(tmp_path: Path) -> None:
    session = opened(write_run(tmp_path), cp=2)
    lines = opening(session)
    (choice,) = session.choices
    assert any(line.startswith(f"sharding {choice.chosen.sharding} most even of 9, ") for line in lines)
    assert any(line.startswith(f"transport {choice.chosen.transport} ") for line in lines)
    assert not any(line.startswith("stage ") for line in lines)
    entropy = unigram_entropy(session.corpus.train)
    shown = re.search(r"unigram entropy ([\d.]+) nats", " ".join(lines))
    assert shown and abs(float(shown[1]) - entropy) < 0.2


def test_a_staged_run_says_it_for_every_stage(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.write_text(RUN.replace("sequence = 121\n", "").replace("steps = 4\n", "") + STAGES)
    session = opened(run, cp=2)
    lines = opening(session)
    start = lines.index("stage rows × tokens steps sharding transport why")
    rows = [line for line in lines[start + 2 :] if re.match(r"\d ", line)]
    for row, choice, begins in zip(rows, session.choices, ("1 2 × 60 2", "2 1 × 240 1,000"), strict=True):
        assert row.startswith(f"{begins} {choice.chosen.sharding} {choice.chosen.transport} most even of 9, ")
    assert not any(line.startswith("sharding ") for line in lines)
    assert any(line.startswith("first batch 2 rows of 60 tokens") for line in lines)
