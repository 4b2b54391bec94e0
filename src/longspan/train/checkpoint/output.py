"""A run's output folder: whose it is, that no other run is at work in it, and that an earlier one is not lost."""

import fcntl
import os
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longspan.errors import CheckpointError, ConfigError
from longspan.spec.run import RunConfig
from longspan.train.checkpoint.folder import remove_leftovers, set_later_aside, sync

__all__ = ["CHECKPOINTS", "Output", "output_folder", "run_id"]

CHECKPOINTS = "checkpoints"
_RUN_ID = "run-id"
# What a run leaves in its output folder; anything else there is not ours to move.
_OF_A_RUN = ("steps.jsonl", "tensorboard", "weights", CHECKPOINTS, _RUN_ID)


@dataclass(frozen=True)
class Output:
    """An output folder that is ready.

    Attributes:
        run_id: of the run that goes on in it.
        notes: what was done to the folder, a line each.
        has_weights: the run's final weights are there already.
    """

    run_id: str
    notes: tuple[str, ...]
    has_weights: bool


def run_id(folder: Path) -> str | None:
    """The run that an output folder belongs to, if it says so."""
    path = folder / _RUN_ID
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


@contextmanager
def output_folder(
    config: RunConfig, *, goes_on_from: int | None, inputs: Iterable[Path] = ()
) -> Generator[Output]:
    """The output folder made ready for a run and held against a second one; for one process of the run.

    A run that starts anew sets what an earlier one left aside, as `FOLDER.1`, `FOLDER.2` and so on.

    Args:
        config: says which folder.
        goes_on_from: step from which the folder's own run goes on, or None for a new run.
        inputs: files and folders that the run reads beside those of its run file.

    Raises:
        CheckpointError: another run is at work in it.
        ConfigError: what would be set aside holds an input of the run.
        OSError: a folder that cannot be made or written.
    """
    folder = config.output.folder
    folder.mkdir(parents=True, exist_ok=True)
    held: list[int] = []
    try:
        if (folder / _RUN_ID).exists():
            held.append(_hold(folder))
        notes = _set_aside(folder, [*_inputs(config), *inputs]) if goes_on_from is None else []
        if not (folder / _RUN_ID).exists():
            _write_run_id(folder)
            held.append(_hold(folder))
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        sync(folder)
        remove_leftovers(folder / CHECKPOINTS)
        if goes_on_from is not None:
            notes += [
                f"{path.name} lies after step {goes_on_from}, where the run goes on; it is kept under this name"
                for path in set_later_aside(folder / CHECKPOINTS, goes_on_from)
            ]
            _cut_last_line(folder / "steps.jsonl")
        identity = run_id(folder)
        assert identity is not None, "written above"
        yield Output(identity, tuple(notes), (folder / "weights" / "config.json").is_file())
    finally:
        for descriptor in held:
            os.close(descriptor)


def _write_run_id(folder: Path) -> None:
    """Name the run, on the disk: a checkpoint whose run is unknown would not be trusted."""
    try:
        descriptor = os.open(folder / _RUN_ID, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        raise CheckpointError(
            f"another run has just started in {folder}; wait for its end or set output.folder"
        ) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(uuid.uuid4().hex + "\n")
        file.flush()
        os.fsync(descriptor)
    sync(folder.parent)


def _hold(folder: Path) -> int:
    """Hold the folder until the descriptor is closed, at the latest by the end of this process."""
    descriptor = os.open(folder / _RUN_ID, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"another run is at work in {folder}; wait for its end or set output.folder"
        ) from None
    except OSError:
        # A file system without locks: nothing can be known there.
        pass
    return descriptor


def _set_aside(folder: Path, inputs: list[Path]) -> list[str]:
    left = [folder / name for name in _OF_A_RUN if (folder / name).exists()]
    if not left:
        return []
    for path in inputs:
        if any(path == item or item in path.parents for item in left):
            raise ConfigError(
                f"{path} is an input of this run and lies in what an earlier run left in {folder}, which would be "
                "set aside; set output.folder"
            )
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for item in left:
        item.rename(aside / item.name)
    return [f"{folder} held an earlier run, which is now in {aside}; --resume would have gone on with it"]


def _inputs(config: RunConfig) -> list[Path]:
    sources = config.data.source if isinstance(config.data.source, tuple) else ()
    given = (config.model.config, config.model.weights, config.data.tokenizer, *sources)
    return [path for path in given if isinstance(path, Path)]


def _cut_last_line(path: Path) -> None:
    """Remove a last line that a killed run did not finish."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
