"""Saving: a copy is taken while training stands still, the rest happens beside it."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from longspan.train.checkpoint.folder import complete, keep_last, publish, step_folder, sync, unfinished
from longspan.train.checkpoint.manifest import INDEX, MANIFEST, FileDigest, Manifest, Progress, digest
from longspan.train.checkpoint.together import Together

__all__ = ["Writer"]

_IDLE, _RUNNING, _FAILED = range(3)


class Writer:
    """Writes the checkpoints of a run; every rank has one and calls its methods in the same order.

    Who writes which tensors is planned at the first save and holds for the run. A save copies the tensors that
    this rank writes, and a thread does the rest: files, checksums, manifest, the name, and the deletion of
    older checkpoints. The copy costs at most one more set of weights and optimizer state.

    Args:
        root: the folder of the run's checkpoints, which exists.
        tensors: all tensors of this rank by name, asked for at each save; always the same names.
        describe: the manifest of a checkpoint without its files.
        threads: ranks, over a group that only the saving thread uses from here on.
        together: ranks, over another group, for agreements while a save is under way.
        keep: how many checkpoints to keep.
        asynchronous: write in a thread, rather than at once.
    """

    def __init__(
        self,
        root: Path,
        tensors: Callable[[], Mapping[str, Tensor]],
        describe: Callable[[Progress], Manifest],
        *,
        threads: Together,
        together: Together,
        keep: int,
        asynchronous: bool,
    ) -> None:
        self._root, self._tensors, self._describe = root, tensors, describe
        self._threads, self._together = threads, together
        self._keep, self._asynchronous = keep, asynchronous
        self._plan: _Plan | None = None
        self._saving: _Saving | None = None

    def save(self, progress: Progress) -> None:
        """Save the run as it is now; a save that is still under way is awaited first.

        Raises:
            LongspanError: that earlier save failed, or this one if it is not asynchronous; the checkpoints that
                were complete are so still.
        """
        self.wait()
        tensors = self._tensors()
        if self._plan is None:
            self._plan = _plan(tensors, self._threads)
        plan, planner = self._plan, _StagedPlanner(self._plan, tensors)
        self._saving = _Saving(lambda: self._write(plan, planner, progress))
        self._saving.start()
        if not self._asynchronous:
            self.wait()

    def check(self) -> None:
        """Raise on all ranks if a save has failed; between two steps, so that none runs ahead of the others."""
        if self._saving is None:
            return
        worst = self._together.largest(self._saving.status)
        if worst != _RUNNING:
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one, and raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()
            if saving.error is not None:
                raise saving.error

    def wait_briefly(self, seconds: float) -> None:
        """Let a save that is under way end, for this long; its error is dropped, as the run fails by another one."""
        if self._saving is not None:
            self._saving.join(seconds)

    def _write(self, plan: "_Plan", planner: "_StagedPlanner", progress: Progress) -> None:
        folder = step_folder(self._root, progress.step)
        last = max(complete(self._root), default=None)
        kept = (
            "no checkpoint is complete yet" if last is None else f"the checkpoint of step {last} is complete"
        )
        words = {
            "doing": f"saving the checkpoint of step {progress.step} in {self._root}",
            "fix": f"{kept}; make room or set output.folder, then start again with --resume",
        }
        try:
            self._threads.through_rank_0(
                lambda: None, lambda parts: [_make_empty(unfinished(folder))] * len(parts), **words
            )
            writer = FileSystemWriter(unfinished(folder), sync_files=False)
            self._threads.through_rank_0(
                lambda: _write_files(writer, plan, planner),
                lambda parts: self._finish(writer, plan, folder, progress, parts),
                **words,
            )
        except BaseException:
            if self._threads.rank == 0:
                shutil.rmtree(unfinished(folder), ignore_errors=True)
            raise

    def _finish(
        self,
        writer: FileSystemWriter,
        plan: "_Plan",
        folder: Path,
        progress: Progress,
        parts: list["_Written"],
    ) -> list[None]:
        """On rank 0, when all files are there: index, manifest, the final name, and older checkpoints go."""
        assert plan.metadata is not None, "rank 0 has the index"
        # `finish` fills it in, and the next save needs it empty.
        writer.finish(replace(plan.metadata), [part.results for part in parts])
        files = {name: found for part in parts for name, found in part.files.items()}
        files[INDEX] = _synced(unfinished(folder) / INDEX)
        self._describe(progress).with_files(files).write(unfinished(folder))
        sync(unfinished(folder) / MANIFEST)
        publish(folder)
        keep_last(self._root, self._keep)
        return [None] * len(parts)


class _Saving(Thread):
    """One save under way. A daemon, so that a rank that fails does not wait for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    @property
    def status(self) -> int:
        if self.is_alive():
            return _RUNNING
        return _IDLE if self.error is None else _FAILED


@dataclass(frozen=True)
class _Plan:
    """Which parts of which tensors this rank writes; on rank 0 also the index of the whole checkpoint."""

    own: SavePlan
    metadata: Metadata | None


@dataclass(frozen=True)
class _Written:
    """What one rank wrote."""

    results: list[WriteResult]
    files: Mapping[str, FileDigest]


def _plan(tensors: Mapping[str, Tensor], together: Together) -> _Plan:
    """Deal out the writing; what several ranks hold is written by one of them."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=together.rank == 0)

    def join(plans: list[SavePlan]) -> list[_Plan]:
        dealt, metadata = planner.create_global_plan(plans)
        dealt = FileSystemWriter("").prepare_global_plan(dealt)
        return [_Plan(own, metadata if rank == 0 else None) for rank, own in enumerate(dealt)]

    return together.through_rank_0(
        planner.create_local_plan, join, doing="planning a checkpoint", fix="start again"
    )


class _StagedPlanner(DefaultSavePlanner):
    """Hands out copies of the tensors, taken when it is made, where the plan asks for the live ones."""

    def __init__(self, plan: _Plan, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = {item.index.fqn: _copy(tensors[item.index.fqn]) for item in plan.own.items}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of this rank's part."""
        return self._copies[index.fqn]


def _copy(tensor: Tensor) -> Tensor:
    """This rank's part, in host memory of its own."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def _write_files(writer: FileSystemWriter, plan: _Plan, planner: _StagedPlanner) -> _Written:
    results = writer.write_data(plan.own, planner).value()
    names = {result.storage_data.relative_path for result in results}
    return _Written(results, {name: _synced(Path(writer.path) / name) for name in names})


def _synced(path: Path) -> FileDigest:
    """Checksum of a file that is on the disk when this returns."""
    sync(path)
    return digest(path)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
