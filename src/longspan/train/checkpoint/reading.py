"""Loading: nothing is read before its checksum is right, and nothing that is read can run code."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from longspan.errors import CheckpointError
from longspan.train.checkpoint.manifest import INDEX, Manifest, verify_files
from longspan.train.checkpoint.together import Together

__all__ = ["CheckedReader", "read_tensors", "verify_together"]

_METADATA = "torch.distributed.checkpoint.metadata"
# All that the index of a checkpoint is made of; dtypes and layouts come besides.
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class CheckedReader(FileSystemReader):
    """Reads tensors of one checkpoint; its index is a pickle, of which only known classes are let in.

    Args:
        folder: the checkpoint, whose files have been compared with the manifest.
        manifest: its manifest.

    Raises:
        CheckpointError: an index that holds anything else, or points outside the files of the manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self.metadata = _read_index(folder / INDEX)
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        files = {info.relative_path for info in self.metadata.storage_data.values()}
        if stray := files - manifest.files.keys():
            raise CheckpointError(
                f"{folder}: its index names {min(stray)!r}, which its manifest does not have"
            )
        self.set_up_storage_reader(self.metadata, is_coordinator=False)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self.metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and dtype of all tensors by name.

        Raises:
            CheckpointError: an entry that is no tensor.
        """
        found = self.metadata.state_dict_metadata
        for name, entry in found.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{self.path}: {name!r} is no tensor; Longspan writes only tensors")
        return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


class _Unpickler(pickle.Unpickler):
    """Lets in the classes of an index and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(kind, torch.dtype):
            return super().find_class(module, name)
        raise CheckpointError(f"it asks for {module}.{name}, which no index of a checkpoint needs")


def _read_index(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} is no index of a checkpoint")
    return index


def verify_together(folder: Path, manifest: Manifest, together: Together, fix: str) -> None:
    """Compare all files with the manifest, each rank a share of them.

    Raises:
        CheckpointError: on all ranks, what is wrong with the first bad file, and `fix`.
    """

    def verify() -> None:
        try:
            verify_files(folder, manifest, list(manifest.files)[together.rank :: together.world])
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {fix}") from None

    together.agree(verify, doing=f"checking {folder}", fix=fix)


def read_tensors(reader: CheckedReader, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of tensors, in place, from a checkpoint of any layout.

    Args:
        reader: the checkpoint.
        tensors: plain or DTensors by name.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or has it in another shape or dtype.
    """
    stored = reader.tensors()
    for name, tensor in tensors.items():
        if name not in stored:
            raise CheckpointError(f"{reader.path} has no {name}; it is of another model")
        found = (tuple(stored[name].size), stored[name].properties.dtype)
        if found != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{reader.path} has {name} as {found[1]} {list(found[0])}, the run needs {tensor.dtype} "
                f"{list(tensor.shape)}; it is of another model"
            )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), reader.metadata)
    plan = planner.finish_plan(planner.create_local_plan())
    try:
        reader.read_data(plan, planner).wait()
    except pickle.UnpicklingError:
        # Torch's own words advise to load it all the same.
        raise CheckpointError(f"{reader.path} holds something else than tensors; it is refused") from None
    except (EOFError, RuntimeError) as error:
        raise CheckpointError(f"{reader.path} cannot be read: {' '.join(str(error).split())[:300]}") from None
