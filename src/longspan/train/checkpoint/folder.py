"""The folder of a run's checkpoints: names, atomic publishing, keeping the last few, clearing away the unfinished."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from longspan.train.checkpoint.manifest import MANIFEST

__all__ = [
    "complete",
    "keep_last",
    "publish",
    "remove_leftovers",
    "set_later_aside",
    "step_folder",
    "steps_in",
    "sync",
    "unfinished",
]

_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".tmp"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    >>> step_folder(Path("checkpoints"), 60).name
    'step-00000060'
    """
    return root / f"step-{step:08d}"


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is written before it is published under its own name."""
    return folder.with_name(folder.name + _UNFINISHED)


def steps_in(root: Path) -> dict[int, Path]:
    """Checkpoints by step, lowest first; complete ones, unless someone took files away."""
    if not root.is_dir():
        return {}
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return dict(sorted(found))


def complete(root: Path) -> dict[int, Path]:
    """Checkpoints that have a manifest by step, lowest first."""
    return {step: path for step, path in steps_in(root).items() if (path / MANIFEST).is_file()}


def publish(folder: Path) -> None:
    """Give an unfinished checkpoint its own name; from then on it survives a crash of the machine.

    Args:
        folder: its final path; the files in `unfinished(folder)` are on the disk already.
    """
    sync(unfinished(folder))
    unfinished(folder).rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_last(root: Path, count: int) -> None:
    """Delete all but the newest checkpoints."""
    for path in list(steps_in(root).values())[:-count]:
        # Half deleted, it must not look like a checkpoint.
        doomed = unfinished(path)
        shutil.rmtree(doomed, ignore_errors=True)
        # What cannot be deleted now is no reason to call the new checkpoint failed; the next start tries again.
        with suppress(OSError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Delete what a killed run left unfinished."""
    for path in root.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(path)


def set_later_aside(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints after a step, which a run that goes on from that step will write anew.

    Returns:
        Their new paths.
    """
    aside = []
    for path in [path for later, path in steps_in(root).items() if later > step]:
        number = 1
        while (new := path.with_name(f"{path.name}.aside-{number}")).exists():
            number += 1
        aside.append(path.rename(new))
    return aside
