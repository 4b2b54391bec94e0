"""A save holds the step at which it was called, whatever training does meanwhile; one that fails harms nothing."""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longspan.errors import CheckpointError
from longspan.testing import run_ranks
from longspan.train.checkpoint import writing
from longspan.train.checkpoint.folder import complete, step_folder
from longspan.train.checkpoint.manifest import Manifest, Progress, read_manifest, verify_files
from longspan.train.checkpoint.reading import CheckedReader, read_tensors
from longspan.train.checkpoint.writing import Writer
from tests.train.checkpoint.runs import together

SIZE = 5000


def describe(progress: Progress) -> Manifest:
    return Manifest(run_id="r", progress=progress, world=1, model={}, config={}, corpus="", versions={})


def writer(root: Path, tensors: dict[str, torch.Tensor], world: int = 1, **settings: Any) -> Writer:
    return Writer(
        root,
        lambda: tensors,
        describe,
        threads=together(world, 1),
        together=together(world, 2),
        **{"keep": 2, "asynchronous": True} | settings,
    )


def saved(root: Path, step: int, names: list[str]) -> dict[str, torch.Tensor]:
    """The content of a checkpoint, after its checksums were compared."""
    folder = step_folder(root, step)
    manifest = read_manifest(folder)
    verify_files(folder, manifest, manifest.files)
    assert manifest.progress.step == step
    tensors = {name: torch.zeros(SIZE) for name in names}
    read_tensors(CheckedReader(folder, manifest), tensors)
    return tensors


@contextmanager
def held_back(seconds: float = 0.3) -> Iterator[None]:
    """Saves that take at least so long before they write."""
    real = writing._write_files

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return real(*arguments)

    with patch.object(writing, "_write_files", slow):
        yield


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_few_are_complete(tmp_path: Path, asynchronous: bool) -> None:
    tensors = {"a": torch.zeros(SIZE)}
    saver = writer(tmp_path, tensors, asynchronous=asynchronous)
    for step in range(1, 5):
        tensors["a"] += 1
        saver.save(Progress(step))
    saver.wait()
    assert list(complete(tmp_path)) == [3, 4]
    assert saved(tmp_path, 3, ["a"])["a"].eq(3).all()
    assert saved(tmp_path, 4, ["a"])["a"].eq(4).all()


@pytest.mark.parametrize("staged", [True, False])
def test_the_content_is_of_the_step_of_the_call(tmp_path: Path, staged: bool) -> None:
    tensors = {"a": torch.ones(SIZE)}
    saver = writer(tmp_path, tensors)
    copy = writing._copy if staged else lambda tensor: tensor
    with held_back(), patch.object(writing, "_copy", copy):
        saver.save(Progress(1))
        tensors["a"] += 1
        saver.wait()
    # Without the copy, what training did afterwards would be in the files.
    assert saved(tmp_path, 1, ["a"])["a"].eq(1 if staged else 2).all()


def test_saving_does_not_hold_training_up(tmp_path: Path) -> None:
    saver = writer(tmp_path, {"a": torch.ones(SIZE)})
    with held_back():
        saver.save(Progress(1))
        assert complete(tmp_path) == {}
        assert threading.active_count() > 1
        saver.check()
        saver.wait()
    assert list(complete(tmp_path)) == [1]


def reduces_beside(rank: int, world: int, root: Path) -> list[int]:
    """How many sums of a training group came out right while each save was under way."""
    weight = torch.zeros(SIZE)
    tensors = {"a": weight, f"own.{rank}": torch.full((SIZE,), float(rank))}
    saver = writer(root, tensors, world)
    counts = []
    with held_back():
        for step in range(1, 4):
            weight += step
            saver.save(Progress(step))
            right = 0
            while saver._saving is not None and right < 1000:
                number = torch.tensor(float(rank + right))
                dist.all_reduce(number)
                assert number == sum(range(world)) + world * right
                # Training goes on: without a copy the file would hold some of this.
                weight += 1000
                right += 1
                saver.check()
            counts.append(right)
            saver.wait()
            weight -= 1000 * right
    return counts


def test_training_sums_while_a_save_is_under_way(tmp_path: Path) -> None:
    counts = run_ranks(reduces_beside, 2, tmp_path)
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0
    for step, value in ((2, 3), (3, 6)):
        content = saved(tmp_path, step, ["a", "own.0", "own.1"])
        assert [float(content[name].mean()) for name in ("a", "own.0", "own.1")] == [value, 0, 1]


def fails_on_a_full_disk(rank: int, world: int, root: Path) -> tuple[str, int]:
    """The error of a second save for which rank 1 has no room, and the steps that ran before it was noticed."""
    tensors = {f"own.{rank}": torch.zeros(SIZE)}
    saver = writer(root, tensors, world)
    saver.save(Progress(1))
    saver.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, limits[1]))
    steps = 0
    try:
        saver.save(Progress(2))
        while steps < 10_000:
            dist.barrier()
            saver.check()
            steps += 1
    except CheckpointError as error:
        return str(error), steps
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error", steps


def test_a_full_disk_ends_the_run_on_all_ranks_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(fails_on_a_full_disk, 2, tmp_path)
    assert first == second
    assert first[0] == (
        f"saving the checkpoint of step 2 in {tmp_path} failed on rank 1: File too large; "
        "the checkpoint of step 1 is complete; make room or set output.folder, then start again with --resume"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert saved(tmp_path, 1, ["own.0", "own.1"])["own.0"].eq(0).all()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file")
    saver = writer(root, {"a": torch.zeros(SIZE)})
    saver.save(Progress(1))
    with pytest.raises(
        CheckpointError, match=r"step 1 in .* Not a directory .*no checkpoint is complete yet;"
    ):
        saver.wait()
    saver.wait()


def breaks_on_one_rank(rank: int, world: int, root: Path) -> str:
    saver = writer(root, {"a": torch.zeros(SIZE)}, world, asynchronous=False)

    def broken(*_: Any) -> None:
        raise TypeError("a fault of ours")

    with patch.object(writing, "_write_files", broken if rank == 1 else writing._write_files):
        try:
            saver.save(Progress(1))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_fault_of_ours_keeps_its_traceback_where_it_happened(tmp_path: Path) -> None:
    first, second = run_ranks(breaks_on_one_rank, 2, tmp_path)
    assert second == "TypeError: a fault of ours"
    assert first == (
        f"CheckpointError: saving the checkpoint of step 1 in {tmp_path} failed on rank 1: TypeError: a fault of ours"
    )
    assert list(tmp_path.iterdir()) == []


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    tensors = {"model.a": torch.arange(SIZE).float()}
    saver = writer(tmp_path, tensors)
    saver.save(Progress(1))
    saver.wait()
    dcp_to_torch_save(step_folder(tmp_path, 1), tmp_path / "plain.pt")
    read = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert torch.equal(read["model.a"], tensors["model.a"])
