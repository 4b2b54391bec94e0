"""A checkpoint's weights as a Hugging Face folder, by one process."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longspan.errors import CheckpointError
from longspan.model import save_hf
from longspan.spec.model import ModelSpec
from longspan.spec.parameters import parameter_shapes
from longspan.train.checkpoint.manifest import Manifest, read_manifest, verify_files
from longspan.train.checkpoint.output import CHECKPOINTS, run_id
from longspan.train.checkpoint.reading import CheckedReader, read_tensors
from longspan.train.checkpoint.resume import earlier_words, refuse_untrusted

__all__ = ["Exported", "export"]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: of the checkpoint.
        dtype: of the weights.
        num_parameters: how many numbers.
        tokenizer: copied beside them; None if the run had none, or it is gone.
    """

    step: int
    dtype: str
    num_parameters: int
    tokenizer: str | None


def export(checkpoint: Path, folder: Path, *, dtype: str | None = None, trust: bool = False) -> Exported:
    """Write a checkpoint's weights as a folder that transformers loads; the checkpoint is only read.

    Holds one file's tensors (up to 5 GB) at once.

    Args:
        checkpoint: of any layout.
        folder: made if missing; refused if it has something in it.
        dtype: name of a torch dtype, or None for the weights' own.
        trust: accept a checkpoint that does not lie where its run wrote it.

    Raises:
        CheckpointError: a checkpoint that is damaged or not trusted.
        OSError: a folder that cannot be written.
    """
    manifest = read_manifest(checkpoint)
    output = checkpoint.parent.parent
    if checkpoint.parent.name != CHECKPOINTS or manifest.run_id != run_id(output):
        refuse_untrusted(checkpoint, trust, f"a run in {output}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; give a new folder")
    try:
        verify_files(checkpoint, manifest, manifest.files)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {earlier_words(checkpoint)}") from None
    reader, spec = CheckedReader(checkpoint, manifest), ModelSpec.model_validate(manifest.model)
    stored = reader.tensors()["model.embed_tokens.weight"].properties.dtype
    chosen = stored if dtype is None else getattr(torch, dtype)
    save_hf(folder, spec, ((name, tensor.to(chosen)) for name, tensor in _weights(reader, spec)))
    return Exported(
        manifest.progress.step,
        str(chosen).removeprefix("torch."),
        spec.num_parameters,
        _copy_tokenizer(manifest, folder),
    )


def _weights(reader: CheckedReader, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every weight, whole, one at a time."""
    stored = reader.tensors()
    for name, shape in parameter_shapes(spec).items():
        key = f"model.{name}"
        dtype = stored[key].properties.dtype if key in stored else torch.float32
        tensor = torch.zeros(shape, dtype=dtype)
        read_tensors(reader, {key: tensor})
        yield name, tensor


def _copy_tokenizer(manifest: Manifest, folder: Path) -> str | None:
    """The run's tokenizer.json beside the weights, if it had one and it is still there."""
    tokenizer = Path(manifest.config["data"]["tokenizer"])
    if not tokenizer.is_file():
        return None
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return str(tokenizer)
