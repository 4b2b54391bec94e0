"""Weights between a decoder, plain or sharded, and Hugging Face folders of safetensors.

A source of weights is any mapping from parameter names to whole tensors: `HfWeights`, `InitialWeights`, a
state dict.
"""

import json
import logging
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from longspan.errors import DataError, UnsupportedError
from longspan.spec.model import ModelSpec
from longspan.spec.parameters import parameter_shapes

__all__ = ["HfWeights", "full_tensors", "load_hf", "materialise", "save_hf", "whole"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD, _TABLE = "lm_head.weight", "embed_tokens.weight"


class HfWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face folder by our names, each mapped from its file when it is asked for.

    Opening reads only the files' headers (and, for tied embeddings stored twice, compares both).

    Args:
        folder: holds `model.safetensors`, or shards with their index.
        spec: the model that the folder must hold.

    Raises:
        DataError: files that cannot be read; tensors that are missing, unexpected or misshaped, named.
        UnsupportedError: a model that Longspan only describes.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec) -> None:
        if reason := spec.refusal():
            raise UnsupportedError(reason)
        self.folder, self.spec = Path(folder), spec
        self._shapes = parameter_shapes(spec)
        self._files = _files_by_name(self.folder)
        self._check()

    def __getitem__(self, name: str) -> Tensor:
        """One whole tensor in the dtype of its file."""
        if name not in self._shapes:
            raise KeyError(name)
        return self._read(_hf_name(name))

    def __iter__(self) -> Iterator[str]:
        """Names of all parameters, in the order of use."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._shapes)

    def _read(self, hf_name: str) -> Tensor:
        with safe_open(str(self._files[hf_name]), framework="pt") as file:
            return file.get_tensor(hf_name)

    def _check(self) -> None:
        needed = {_hf_name(name): shape for name, shape in self._shapes.items()}
        stored = _stored_shapes(self._files)
        head_too = self.spec.tie_embeddings and stored.pop(_HEAD, None)
        common = needed.keys() & stored.keys()
        _refuse(
            f"weights in {self.folder} do not fit their config",
            missing=needed.keys() - common,
            unexpected=stored.keys() - common,
            misshaped=[f"{n} {stored[n]}, not {needed[n]}" for n in common if stored[n] != needed[n]],
        )
        if head_too and not torch.equal(self._read(_HEAD), self._read(_hf_name(_TABLE))):
            raise DataError(
                f"weights in {self.folder}: {_HEAD} differs from the embedding that it is tied to"
            )


def load_hf(folder: str | Path) -> HfWeights:
    """The weights of a Hugging Face folder, checked against the folder's own `config.json`.

    A decoder with fewer layers, or with another RoPE, can be filled from them too. Raises what `HfWeights`
    and `ModelSpec.from_hf` raise.
    """
    return HfWeights(folder, ModelSpec.from_hf(folder))


def save_hf(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json` and the weights as a folder that transformers loads; bits and dtypes are kept.

    One process writes; see `full_tensors` for a sharded decoder. One file's tensors are held at once.

    Args:
        folder: made if missing.
        spec: the model.
        tensors: all parameters, whole, with our names (`full_tensors`, or `.items()` of a mapping).
        max_file_bytes: weights that need more than this are split over several files with an index.

    Raises:
        DataError: tensors that are missing, unexpected or misshaped, named.
        UnsupportedError: the model's family cannot express it.
    """
    folder, config, shapes = Path(folder), spec.to_hf(), parameter_shapes(spec)
    folder.mkdir(parents=True, exist_ok=True)
    sizes: list[dict[str, int]] = []
    dtypes: set[torch.dtype] = set()
    with TemporaryDirectory(dir=folder) as unfinished:
        mode = _usual_mode(Path(unfinished) / "mode")
        for part in _parts(_checked(shapes, tensors), max_file_bytes):
            file = Path(unfinished) / str(len(sizes))
            save_file(part, file, metadata={"format": "pt"})
            # safetensors lets only the owner read its files.
            file.chmod(mode)
            sizes.append({name: tensor.nbytes for name, tensor in part.items()})
            dtypes |= {tensor.dtype for tensor in part.values()}
        _publish(folder, Path(unfinished), sizes)
    if len(dtypes) == 1:
        config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    _write_json(folder / "config.json", config)


def full_tensors(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a decoder, whole, one at a time; a collective over its mesh if it is sharded."""
    for name, parameter in decoder.named_parameters():
        yield name, whole(parameter.detach())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; a collective over its mesh if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    # DTensor advises to flatten the mesh, which would save a message at the end of a run and nothing in a step.
    advice = logging.getLogger("torch.distributed.tensor._redistribute")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        return tensor.full_tensor()
    finally:
        advice.setLevel(level)


@torch.no_grad()
def materialise(
    decoder: nn.Module, source: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
) -> None:
    """Give a decoder its numbers: fill every parameter, plain or DTensor, from the source's whole tensor.

    Each rank reads whole tensors and keeps its part, without communication, holding one at a time.

    Args:
        decoder: on the meta device or not; its parameters may be sharded or replicated over any mesh.
        source: name to whole tensor, cast to the parameter's dtype.
        device: where the parameters live afterwards.

    Raises:
        DataError: the source lacks a parameter or has it in another shape.
    """
    _refuse("weights", missing=[name for name, _ in decoder.named_parameters() if name not in source])
    decoder.to_empty(device=device)
    for name, parameter in decoder.named_parameters():
        tensor = source[name]
        if tensor.shape != parameter.shape:
            _refuse("weights", misshaped=[f"{name} {tuple(tensor.shape)}, not {tuple(parameter.shape)}"])
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        parameter.copy_(tensor)


def _hf_name(name: str) -> str:
    return name if name == _HEAD else f"model.{name}"


def _files_by_name(folder: Path) -> dict[str, Path]:
    """File of every tensor, by its Hugging Face name."""
    if (folder / _INDEX).is_file():
        return {name: folder / file for name, file in _read_index(folder / _INDEX).items()}
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_header(folder / _SINGLE), folder / _SINGLE)
    raise DataError(f"{folder} has neither {_SINGLE} nor {_INDEX}; save the model as safetensors")


def _read_index(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read {path}: {error!r}") from None


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in one file, by its name there."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _stored_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that are where they should be, without the rotary frequencies of old files."""
    headers = {path: _header(path) for path in set(files.values())}
    return {
        name: headers[path][name]
        for name, path in files.items()
        if name in headers[path] and not name.endswith("rotary_emb.inv_freq")
    }


def _refuse(where: str, **problems: Collection[str]) -> None:
    """Raise one DataError that names the first few offenders of each kind, if there are any."""
    told = [f"{problem} {_some(names)}" for problem, names in problems.items() if names]
    if told:
        raise DataError(f"{where}: " + "; ".join(told))


def _some(names: Collection[str], shown: int = 5) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(sorted(names)[:shown]) + rest


def _checked(
    shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, refusing any that the model does not have and, at the end, any that never came."""
    missing = set(shapes)
    for name, tensor in tensors:
        if name not in missing or shapes[name] != tensor.shape:
            _refuse("weights to save", unexpected=[f"{name} {tuple(tensor.shape)}"])
        missing.remove(name)
        yield name, tensor
    _refuse("weights to save", missing=missing)


def _parts(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(kept.nbytes for kept in part.values()) + tensor.nbytes > max_bytes:
            yield part
            part = {}
        part[_hf_name(name)] = tensor.cpu().contiguous()
    yield part


def _usual_mode(probe: Path) -> int:
    """The permissions of a new file, found without touching the process's umask."""
    probe.touch()
    return stat.S_IMODE(probe.stat().st_mode)


def _publish(folder: Path, unfinished: Path, sizes: list[dict[str, int]]) -> None:
    """Move the files into the folder under their final names, in place of the weights that it held."""
    for old in (folder / _INDEX, folder / _SINGLE, *folder.glob("model-*-of-*.safetensors")):
        old.unlink(missing_ok=True)
    if len(sizes) == 1:
        (unfinished / "0").replace(folder / _SINGLE)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(sizes):
        file = f"model-{number + 1:05d}-of-{len(sizes):05d}.safetensors"
        (unfinished / str(number)).replace(folder / file)
        places |= dict.fromkeys(part, file)
    total = sum(sum(part.values()) for part in sizes)
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
