"""Runs that are killed at any moment go on, through the real command line, as if they had never stopped."""

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspan.train.checkpoint.folder import complete, steps_in
from tests.cli.commands import done, longspan, one_line, refused
from tests.cli.ranks import ended, started, wait_until
from tests.cli.test_train import records
from tests.verify.runs import write_run

STEPS, EVERY = 45, 3
LONG = (
    "--layout.cp", "2", "--train.steps", str(STEPS), "--checkpoint.every", str(EVERY), "--train.eval_every", "8",
    "--train.timeout_s", "60",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def uninterrupted(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the whole run, in processes that `longspan train` starts."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    result = done("train", run, *LONG, "--output.folder", folder)
    assert result["checkpoint"] == str(folder / "checkpoints" / f"step-{STEPS:08d}")
    assert [*complete(folder / "checkpoints")] == [STEPS - EVERY, STEPS]
    return folder


def curve(folder: Path) -> dict[tuple[str, int], tuple[float, float | None]]:
    """Loss and gradient norm of every step and evaluation; one that was taken twice must have come out the same."""
    found: dict[tuple[str, int], tuple[float, float | None]] = {}
    for record in records(folder):
        if record["kind"] != "run":
            values = (record["loss"], record.get("grad_norm"))
            assert found.setdefault((record["kind"], record["step"]), values) == values
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights" / "model.safetensors")


def assert_same(folder: Path, whole: Path) -> None:
    assert curve(folder) == curve(whole)
    ours, theirs = weights(folder), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def lines(folder: Path) -> int:
    path = folder / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def unfinished(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*.tmp"))


def survive(run: Path, folder: Path, whole: Path, kills: int, seed: int) -> list[str]:
    """Kill a run so many times, each time going on, then let it end; what each kill met."""
    moments, met = random.Random(seed), []
    words = ("train", run, *LONG, "--output.folder", folder, "--json")
    for number in itertools.count():
        newest = max(steps_in(folder / "checkpoints"), default=None)
        resume = () if newest is None else ("--resume",)
        with started(*words, *resume, ranks=2, slow_saves_s=0.2) as processes:
            if number == kills:
                assert ended(processes) == ["", ""]
                break
            before = lines(folder) if resume else 0
            if number % 2:
                assert wait_until(lambda: unfinished(folder), processes)
                time.sleep(moments.uniform(0, 0.25))
            else:
                more = moments.randint(1, 5)
                assert wait_until(lambda: lines(folder) > before + more, processes)  # noqa: B023
            saving = unfinished(folder)
            # All at once as when a machine dies, or one alone.
            for process in processes if moments.random() < 0.6 else processes[:1]:
                process.kill()
            ended(processes)
            met.append("saving" if saving else "between saves")
        assert all(step % EVERY == 0 for step in complete(folder / "checkpoints"))
        assert complete(folder / "checkpoints") == steps_in(folder / "checkpoints")
        for place in (folder, *folder.parent.glob(f"{folder.name}.*")):
            assert curve(place).items() <= curve(whole).items()
    return met


def test_killed_twice_it_ends_as_if_it_had_not_been(run: Path, tmp_path: Path, uninterrupted: Path) -> None:
    met = survive(run, tmp_path / "out", uninterrupted, kills=2, seed=0)
    assert "saving" in met
    assert_same(tmp_path / "out", uninterrupted)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_twenty_kills(run: Path, tmp_path: Path, uninterrupted: Path, seed: int) -> None:
    met = survive(run, tmp_path / "out", uninterrupted, kills=5, seed=1 + seed)
    assert set(met) == {"saving", "between saves"}
    assert_same(tmp_path / "out", uninterrupted)


@pytest.fixture
def four_steps(run: Path, tmp_path: Path) -> Iterator[Path]:
    """A finished run of one process with checkpoints of steps 2 and 4; commands run in its folder."""
    done("train", run, "--checkpoint.every", "2", "--output.folder", tmp_path / "out")
    yield tmp_path / "out"


def test_going_on_in_another_layout_and_on_a_finished_run(
    run: Path, four_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = curve(four_steps)
    older = four_steps / "checkpoints" / "step-00000002"
    words = ("train", run, "--checkpoint.every", "2", "--output.folder", four_steps)
    split = longspan(*words, "--layout.tp", "2", "--resume", older)
    assert split.returncode == 0, split.stderr
    assert f"going on from {older}: 2 steps, 484 tokens" in split.stderr
    assert "step-00000004.aside-1 lies after step 2" in split.stderr
    runs = [record for record in records(four_steps) if record["kind"] == "run"]
    assert [head["resumed_from_step"] for head in runs] == [None, 2]
    again = {record["step"]: record["loss"] for record in records(four_steps) if record["kind"] == "step"}
    assert [again[step] for step in (3, 4)] == pytest.approx(
        [whole["step", step][0] for step in (3, 4)], rel=1e-5
    )

    before = {path: path.read_bytes() for path in four_steps.rglob("*") if path.is_file()}
    result = done(*words, "--resume", "latest")
    assert result == {
        **dict.fromkeys(("first_loss", "last_loss", "eval_loss", "tokens_per_s", "peak_bytes")),
        **dict.fromkeys(("first_evaluation", "last_evaluation")),
        "unigram_entropy": result["unigram_entropy"],
        "seconds": result["seconds"],
        "checkpoint": str(four_steps / "checkpoints" / "step-00000004"),
        **{"last_step": None, "skipped_steps": 0, "stopped": None},
        "notes": [f"going on from {four_steps / 'checkpoints' / 'step-00000004'}: 4 steps, 968 tokens"],
    }
    assert {path: path.read_bytes() for path in four_steps.rglob("*") if path.is_file()} == before


def test_a_run_that_starts_anew_loses_nothing(run: Path, four_steps: Path) -> None:
    finished = longspan("train", run, "--output.folder", four_steps, "--train.seed", "1")
    assert finished.returncode == 0
    aside = four_steps.with_name("out.1")
    assert f"{four_steps} held an earlier run, which is now in {aside}" in finished.stderr
    assert [*complete(aside / "checkpoints")] == [2, 4]
    assert [*complete(four_steps / "checkpoints")] == [4]
    assert curve(aside)["step", 1] != curve(four_steps)["step", 1]


def test_damage_is_one_line_on_several_ranks_too(
    run: Path, four_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = four_steps / "checkpoints" / "step-00000004" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    line = (
        f"{file} is damaged: its checksum differs from the manifest's; an earlier one is complete: --resume "
        f"{file.parent.with_name('step-00000002')}"
    )
    words = ("train", run, "--output.folder", four_steps, "--resume", "--json")
    finished = longspan(*words, "--layout.cp", "2")
    assert (finished.returncode, finished.stdout, one_line(finished.stderr)) == (2, "", line)
    assert refused(capsys, *words, "--train.threads", "1") == line
    assert (four_steps / "weights" / "model.safetensors").exists()


def test_a_damaged_older_one_leaves_the_newer_ones_where_they_are(
    run: Path, four_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = four_steps / "checkpoints" / "step-00000002"
    (older / ".metadata").unlink()
    before = sorted(path for path in four_steps.rglob("*"))
    line = refused(
        capsys,
        "train",
        run,
        "--output.folder",
        four_steps,
        "--resume",
        older,
        "--json",
        *("--train.threads", "1"),
    )
    assert line == f"{older / '.metadata'} is missing; there is no earlier one beside it"
    elsewhere = ("--output.folder", four_steps.with_name("new"), "--trust-checkpoint")
    refused(capsys, "train", run, *elsewhere, "--resume", older, "--json", *("--train.threads", "1"))
    assert sorted(path for path in four_steps.rglob("*")) == before
    assert not four_steps.with_name("new").exists()


def test_a_changed_corpus_is_refused(run: Path, four_steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added = run.parent / "corpus" / "more.txt"
    added.write_text("another document")
    try:
        words = ("train", run, "--output.folder", four_steps, "--resume", "--json", "--train.threads", "1")
        assert "saw other training documents than data.source has now" in refused(capsys, *words)
    finally:
        added.unlink()


FULL_AT_STEP_4 = """
import resource, sys
from longspan.cli import main
from longspan.train.checkpoint.writing import Writer

save = Writer.save

def limited(self, progress):
    if progress.step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    save(self, progress)

Writer.save = limited
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_line_and_the_last_checkpoint_goes_on(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("train", run, "--checkpoint.every", "2", "--output.folder", folder, "--train.steps", "6")
    full = subprocess.run(
        [sys.executable, "-c", FULL_AT_STEP_4, *map(str, words), "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (full.returncode, full.stdout) == (2, "")
    assert one_line(full.stderr) == (
        f"saving the checkpoint of step 4 in {folder / 'checkpoints'} failed on rank 0: File too large; the "
        "checkpoint of step 2 is complete; make room or set output.folder, then start again with --resume"
    )
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    done(*words, "--resume")
    assert [step for kind, step in curve(folder) if kind == "step"] == [1, 2, 3, 4, 5, 6]
