"""Filling plain and sharded decoders. Loads no transformers, as every rank imports this module."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from longspan.errors import DataError
from longspan.model import Decoder, InitialWeights, full_tensors, materialise
from longspan.spec.model import ModelSpec
from longspan.testing import cached_mesh, run_ranks

# Sizes that no mesh dimension divides: every rank's part is uneven, and some parts are empty.
UNEVEN = ModelSpec(
    family="qwen3", num_layers=1, hidden_size=10, intermediate_size=7, num_heads=3, head_dim=2, vocab_size=3
)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "replicated": ((4,), (Replicate(),)),
    "rows-twice": ((2, 2), (Shard(0), Shard(0))),
    "columns-and-rows": ((2, 2), (Shard(-1), Shard(0))),
    "replicated-and-columns": ((2, 2), (Replicate(), Shard(-1))),
}


def test_materialise_names_what_does_not_fit() -> None:
    weights = dict(InitialWeights(UNEVEN, seed=0))
    with pytest.raises(DataError, match=r"misshaped norm.weight \(3,\), not \(10,\)"):
        materialise(Decoder(UNEVEN), weights | {"norm.weight": torch.ones(3)})
    del weights["layers.0.mlp.up_proj.weight"]
    with pytest.raises(DataError, match="missing layers.0.mlp.up_proj.weight"):
        materialise(Decoder(UNEVEN), weights)


def sharded(module: nn.Module, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    mesh = cached_mesh(shape, ("a", "b")[: len(shape)])
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            dims = [Shard(p.dim % parameter.dim()) if isinstance(p, Shard) else p for p in placements]
            split = distribute_tensor(parameter, mesh, dims, src_data_rank=None)
            child.register_parameter(name, nn.Parameter(split))


def fill_sharded(
    rank: int, world: int, shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[tuple[bool, bool]]:
    decoder, source = Decoder(UNEVEN, torch.float64), InitialWeights(UNEVEN, seed=7)
    sharded(decoder, shape, placements)
    materialise(decoder, source)
    return check_filled(decoder, source)


def fill_fsdp_on_tp(rank: int, world: int) -> list[tuple[bool, bool]]:
    """FSDP on top of tensor parallelism, whose parts of a tensor are interleaved."""
    decoder, source = Decoder(UNEVEN, torch.float64), InitialWeights(UNEVEN, seed=7)
    mesh = cached_mesh((2, 2), ("a", "b"))
    for child in decoder.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, mesh["b"], [Shard(0)], src_data_rank=None)
            child.register_parameter(name, nn.Parameter(split))
    fully_shard(decoder, mesh=mesh["a"])
    materialise(decoder, source)
    return check_filled(decoder, source)


def check_filled(decoder: Decoder, source: InitialWeights) -> list[tuple[bool, bool]]:
    """For each parameter: is it split over the mesh, and whole again the source's own?"""
    kinds = [isinstance(parameter, DTensor) for parameter in decoder.parameters()]
    equal = [torch.equal(whole, source[name].double()) for name, whole in full_tensors(decoder)]
    return list(zip(kinds, equal, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_materialise_fills_sharded_parameters(layout: str) -> None:
    for filled in run_ranks(fill_sharded, 4, *LAYOUTS[layout]):
        assert set(filled) == {(True, True)}


def test_materialise_fills_fsdp_on_tensor_parallel_parameters() -> None:
    for filled in run_ranks(fill_fsdp_on_tp, 4):
        assert set(filled) == {(True, True)}
