"""Nothing in a checkpoint can run code, and only tensors of the right names, shapes and dtypes are taken."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata

from longspan.errors import CheckpointError
from longspan.testing import run_ranks
from longspan.train.checkpoint.folder import step_folder
from longspan.train.checkpoint.manifest import Manifest, Progress, digest, read_manifest
from longspan.train.checkpoint.reading import CheckedReader, read_tensors, verify_together
from tests.train.checkpoint.runs import together
from tests.train.checkpoint.test_writing import SIZE, writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saver = writer(tmp_path, {"a": torch.arange(SIZE).float(), "b": torch.ones(2, 3).double()})
    saver.save(Progress(1))
    saver.wait()
    return step_folder(tmp_path, 1)


class Prepared:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def index(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


def replace_index(folder: Path, content: Any) -> Manifest:
    """Another index with a manifest that fits it, as someone would make who wants it read."""
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    manifest = read_manifest(folder)
    manifest = manifest.with_files({name: digest(folder / name) for name in manifest.files})
    manifest.write(folder)
    return manifest


def test_a_prepared_index_runs_nothing(folder: Path, tmp_path: Path) -> None:
    manifest = replace_index(folder, Prepared(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"refused: it asks for posix.mkdir, which no index"):
        CheckedReader(folder, manifest)
    assert not (tmp_path / "ran").exists()
    # Torch's own reader would have run it.
    with pytest.raises(AttributeError):
        FileSystemReader(folder).read_metadata()
    assert (tmp_path / "ran").exists()


def with_words(found: Metadata) -> Metadata:
    found.state_dict_metadata["a"] = "words"
    return found


def pointing_elsewhere(found: Metadata) -> Metadata:
    for info in found.storage_data.values():
        info.relative_path = "../elsewhere"
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_words, "'a' is no tensor; Longspan writes only tensors"),
        (pointing_elsewhere, "its index names '../elsewhere', which its manifest does not have"),
        (lambda _: {"a": 1}, "is no index of a checkpoint"),
        (lambda _: torch.nn.Linear, "it asks for torch.nn.modules.linear.Linear"),
    ],
)
def test_another_index_is_refused(folder: Path, change: Callable[[Metadata], Any], words: str) -> None:
    manifest = replace_index(folder, change(index(folder)))
    with pytest.raises(CheckpointError, match=words):
        read_tensors(CheckedReader(folder, manifest), {"a": torch.zeros(SIZE)})


def test_a_prepared_tensor_runs_nothing(folder: Path, tmp_path: Path) -> None:
    torch.save(Prepared(tmp_path / "ran"), folder / "__0_0.distcp")
    found = index(folder)
    for info in found.storage_data.values():
        info.offset, info.length = 0, (folder / "__0_0.distcp").stat().st_size
    manifest = replace_index(folder, found)
    with pytest.raises(CheckpointError, match="holds something else than tensors; it is refused"):
        read_tensors(CheckedReader(folder, manifest), {"a": torch.zeros(SIZE)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"c": torch.zeros(1)}, "has no c; it is of another model"),
        ({"a": torch.zeros(SIZE + 1)}, "has a as torch.float32 .5000., the run needs torch.float32 .5001.;"),
        ({"b": torch.zeros(2, 3)}, "has b as torch.float64 .2, 3., the run needs torch.float32 .2, 3.;"),
    ],
)
def test_tensors_must_fit(folder: Path, wanted: dict[str, torch.Tensor], words: str) -> None:
    reader = CheckedReader(folder, read_manifest(folder))
    with pytest.raises(CheckpointError, match=words):
        read_tensors(reader, wanted)
    own = {"a": torch.zeros(SIZE), "b": torch.zeros(2, 3).double()}
    read_tensors(reader, own)
    assert own["a"][7] == 7 and own["b"].eq(1).all()


def verified(rank: int, world: int, folder: Path) -> str:
    try:
        verify_together(folder, read_manifest(folder), together(world), "do this")
    except CheckpointError as error:
        return str(error)
    return "whole"


def test_all_ranks_learn_of_one_bad_file(folder: Path) -> None:
    assert run_ranks(verified, 2, folder) == ["whole", "whole"]
    content = bytearray((folder / ".metadata").read_bytes())
    content[-3] ^= 1
    (folder / ".metadata").write_bytes(content)
    words = f"{folder / '.metadata'} is damaged: its checksum differs from the manifest's; do this"
    assert run_ranks(verified, 2, folder) == [words, words]
