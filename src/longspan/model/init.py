"""Fresh weights, each a function of the seed and its own name: no layout or order changes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor

from longspan.spec.model import ModelSpec
from longspan.spec.parameters import parameter_shapes

__all__ = ["InitialWeights", "initial_tensor"]


def initial_tensor(spec: ModelSpec, name: str, seed: int) -> Tensor:
    """The fresh value of one parameter, whole and in float32: norms 1, biases 0, others normal.

    Raises:
        KeyError: the model has no parameter of this name.
    """
    shape = parameter_shapes(spec)[name]
    return _fresh(name, shape, spec.initializer_range, seed)


@dataclass(frozen=True)
class InitialWeights(Mapping[str, Tensor]):
    """Fresh weights of a whole model by name, each made when it is asked for."""

    spec: ModelSpec
    seed: int

    def __getitem__(self, name: str) -> Tensor:
        """The fresh value of one parameter, as `initial_tensor` gives it."""
        return _fresh(name, self._shapes[name], self.spec.initializer_range, self.seed)

    def __iter__(self) -> Iterator[str]:
        """Names of all parameters, in the order of use."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._shapes)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.spec)


def _fresh(name: str, shape: tuple[int, ...], spread: float, seed: int) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.normal(0.0, spread, shape, generator=generator)
