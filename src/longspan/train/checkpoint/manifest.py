"""The manifest of a checkpoint: what it holds and the checksum of every file; written last, checked first."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError

__all__ = [
    "INDEX",
    "MANIFEST",
    "FileDigest",
    "Manifest",
    "Progress",
    "digest",
    "read_manifest",
    "verify_files",
]

MANIFEST = "manifest.json"
# Where torch keeps which file holds which part of which tensor.
INDEX = ".metadata"
# Raised when a checkpoint of this version cannot be read by older code, or the other way round.
FORMAT = 1
_CHECKSUM = "checksum"


@dataclass(frozen=True)
class Progress:
    """How far a run has come; the data position and the schedule follow from it.

    Attributes:
        step: optimizer steps taken, skipped ones among them.
        seen_tokens: tokens consumed.
        skipped_steps: steps whose update was left out.
    """

    step: int = 0
    seen_tokens: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All about a checkpoint except its tensors.

    Attributes:
        run_id: which run wrote it.
        progress: where that run was.
        world: number of ranks that wrote it.
        model: the model's sizes (`ModelSpec`).
        config: the whole run file.
        corpus: digest of the training documents.
        versions: of Python and packages.
        files: every other file of the folder by name.
    """

    run_id: str
    progress: Progress
    world: int
    model: Mapping[str, Any]
    config: Mapping[str, Any]
    corpus: str
    versions: Mapping[str, str]
    files: Mapping[str, FileDigest] = field(default_factory=dict)

    def with_files(self, files: Mapping[str, FileDigest]) -> "Manifest":
        """The same with these files."""
        return replace(self, files=dict(sorted(files.items())))

    def write(self, folder: Path) -> None:
        """Write it into the checkpoint's folder."""
        body = json.loads(json.dumps({"format": FORMAT} | asdict(self)))
        text = json.dumps({_CHECKSUM: _checksum(body)} | body, indent=1, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its own checksum; the other files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged or of another format.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        told = body.pop(_CHECKSUM)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is no manifest any more") from None
    if told != _checksum(body):
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    if body.pop("format") != FORMAT:
        raise CheckpointError(f"{path} is of another format than {FORMAT}; use the Longspan that wrote it")
    try:
        files = {name: FileDigest(**found) for name, found in body.pop("files").items()}
        return Manifest(progress=Progress(**body.pop("progress")), files=files, **body)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); use the Longspan that wrote it") from None


def digest(path: Path) -> FileDigest:
    """Size and checksum of a file as it lies on the disk."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with the manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        names: which of its files.

    Raises:
        CheckpointError: the first file that is missing, cut short or altered.
    """
    for name in names:
        path, told = folder / name, manifest.files[name]
        if Path(name).name != name:
            raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is no file of its folder")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if (size := path.stat().st_size) != told.bytes:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, not {told.bytes}")
        if digest(path) != told:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest's")


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
