"""Whatever happens to one rank, all ranks end soon, and the user is told the first error in one line."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import one_line
from tests.failures.commands import Ended, fault, faulty
from tests.verify.runs import write_run

END_S = 10.0
TIMEOUT_S = 10.0
TWO = ("--layout.cp", "2", "--train.eval_every", "0", "--train.steps", "6")
HANGS = (*TWO, "--train.timeout_s", str(TIMEOUT_S))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def first_line(ended: Ended, within_s: float) -> str:
    """What the command said in its one line; a stack may follow. It ended in time and left readable records."""
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert ended.seconds < within_s, ended.err
    line, _, note = ended.err.partition("\n")
    assert note == "" or note.startswith(("Traceback", "thread ", "  File", "Fatal Python error"))
    return one_line(line + "\n")


def steps(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run.parent / "out" / "steps.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "step"]


def test_without_a_fault_all_is_well(run: Path) -> None:
    ended = faulty(run, fault("raises", rank=1, step=99), words=TWO)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["stopped"] is None
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_a_rank_that_raises_ends_a_busy_one_that_ignores_signals(run: Path) -> None:
    ended = faulty(run, fault("spins", rank=0), fault("raises", rank=1), words=TWO)
    line = first_line(ended, END_S)
    assert line == "rank 1 failed first, in step 3: ValueError: a fault for a test"
    assert "Traceback" in ended.err and "in raises" in ended.err
    assert steps(run) == [1, 2]


@pytest.mark.parametrize(
    ("what", "rank", "line"),
    [
        ("is_killed", 1, "rank 1 died in step 3: killed by SIGKILL"),
        pytest.param("is_killed", 0, "rank 0 died in step 3: killed by SIGKILL", marks=pytest.mark.grid),
        pytest.param("exits", 0, "rank 0 died in step 3: it left with exit code 7", marks=pytest.mark.grid),
        pytest.param("raises", 0, "rank 0 failed first, in step 3: ValueError: a f", marks=pytest.mark.grid),
    ],
)
def test_a_rank_that_ends_ends_those_that_wait_for_it(run: Path, what: str, rank: int, line: str) -> None:
    assert first_line(faulty(run, fault(what, rank), words=TWO), END_S).startswith(line)
    assert steps(run) == [1, 2]


def test_a_rank_that_sleeps_is_named_with_the_place(run: Path) -> None:
    line = first_line(faulty(run, fault("sleeps", rank=1), words=HANGS), TIMEOUT_S + END_S)
    assert line.startswith("rank 1 hung in step 3: no progress for ")
    assert "tests/failures/faulty.py:" in line and line.endswith("in sleeps")


@pytest.mark.grid
def test_a_rank_in_an_endless_loop_is_named_with_the_place(run: Path) -> None:
    line = first_line(faulty(run, fault("spins", rank=0), words=HANGS), TIMEOUT_S + END_S)
    assert line.startswith("rank 0 hung in step 3: no progress for ") and line.endswith("in spins")


def test_a_stopped_process_is_named_by_its_silence(run: Path) -> None:
    line = first_line(faulty(run, fault("is_stopped", rank=1), words=HANGS), TIMEOUT_S + END_S)
    assert line.startswith(
        "rank 1 stopped answering in step 3: its process was stopped (state T); rank 0 waited for it at "
    )


@pytest.mark.grid
def test_ranks_that_wait_for_each_other_are_all_named(run: Path) -> None:
    line = first_line(faulty(run, fault("goes_astray", rank=1), words=HANGS), TIMEOUT_S + END_S)
    assert line.startswith("no rank failed, but the ranks wait for each other: rank 0 in step 3 at ")
    assert "; rank 1 in step 3 at " in line and line.endswith("in goes_astray")


@pytest.mark.grid
def test_sums_of_different_sizes_end_the_run(run: Path) -> None:
    line = first_line(faulty(run, fault("sums_too_much", rank=1), words=HANGS), TIMEOUT_S + END_S)
    assert "in step 3" in line and ("SIGABRT" in line or "wait for each other" in line)


def test_under_torchrun_every_rank_says_who_failed_first(run: Path) -> None:
    faults = (fault("spins", rank=0), fault("raises", rank=2))
    words = ("--layout.cp", "3", *TWO[2:])
    ended = faulty(run, *faults, words=words, ranks=3)
    assert (ended.code, ended.out) == (1, "")
    assert ended.seconds < END_S
    lines = [line for line in ended.err.splitlines() if line.startswith("longspan: ")]
    assert lines == ["longspan: rank 2 failed first, in step 3: ValueError: a fault for a test"] * 3
    records = run.parent / "out" / "failures"
    assert json.loads((records / "rank2.json").read_text())["kind"] == "error"
    assert json.loads((records / "rank1.json").read_text())["kind"] in ("lost", "waiting")


@pytest.mark.grid
def test_under_torchrun_a_stopped_process_is_named_and_ends(run: Path) -> None:
    ended = faulty(run, fault("is_stopped", rank=1), words=HANGS, ranks=2)
    assert ended.code == 1
    assert ended.seconds < TIMEOUT_S + END_S
    assert "longspan: rank 1 stopped answering in step 3" in ended.err
