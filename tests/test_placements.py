"""What `ownership` says of a layout is what the ranks really hold: tokens, weights and gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from longspan.attention import Meter, choose_kernel
from longspan.model import InitialWeights, whole
from longspan.spec.layout import Layout
from longspan.spec.ownership import ModuleShards, ownership
from longspan.testing import run_ranks
from longspan.train import forward
from longspan.train.context_parallel import ContextParallel
from longspan.train.forward import ParallelModel, prepare
from longspan.train.groups import Groups
from longspan.train.parallelize import ModelOptions, build_model
from longspan.train.session import StepBatches
from longspan.train.step import gradients_of
from tests.train.parity import SEQUENCE, batches, groups, tiny_model

Tokens = dict[str, tuple[int, int]]
"""Tokens that one rank sees of a module's input and output, by the module's name."""


@dataclass
class Held:
    """What one rank holds of one parameter.

    Attributes:
        weight_dim: the dimension that tp splits, or None.
        shape: shape of the local part between uses.
        partial: whether the gradient comes out of backward as one summand of tp.
        before: norm of this rank's gradient as backward leaves it, when nothing sums it over dp × cp.
        after: norm of the whole gradient once all is summed.
    """

    weight_dim: int | None
    shape: tuple[int, ...]
    partial: bool
    before: float
    after: float


def observed(rank: int, world: int, sizes: dict, model: str) -> tuple[Tokens, dict[str, Held]]:
    """One forward and backward pass, watched from outside; once more without data parallelism's sums."""
    layout = Layout(**sizes)
    group = groups(layout)
    parallel, batches = tiny_step(replace(group, weights=None), model)
    with Watched(parallel.decoder) as tokens:
        loss, _ = parallel.token_losses(batches.micro_batches[0], batches.num_targets)
    loss.backward()
    before = {name: (local_norm(p), is_partial(p.grad)) for name, p in parallel.decoder.named_parameters()}
    parallel, batches = tiny_step(group, model)
    gradients_of(parallel, batches)
    held = {}
    for name, p in parallel.decoder.named_parameters():
        norm, partial = before[name]
        held[name] = Held(split_dim(p), tuple(local(p).shape), partial, norm, float(whole(p.grad).norm()))
    return tokens, held


def tiny_step(group: Groups, model: str) -> tuple[ParallelModel, StepBatches]:
    """A model and one micro-batch on each dp rank."""
    spec, layout = tiny_model(model), group.layout
    decoder = build_model(spec, InitialWeights(spec, 0), group, ModelOptions(torch.float64, torch.float64))
    parallel = ParallelModel(
        decoder, group, choose_kernel("auto", "cpu", torch.float64), Meter(), loss_chunk=16
    )
    context = ContextParallel(layout.cp, group.coordinate("cp"), "zigzag", "ring")
    rows = batches("crossing", layout.dp)
    micro = prepare(rows[group.coordinate("dp")], tuple(spec.window_layers), context)
    return parallel, StepBatches(0, (micro,), sum(row.num_targets for row in rows))


class Watched:
    """Counts the tokens that pass through every module of the first layer, the ends, attention and loss."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder, self.tokens = decoder, {}

    def __enter__(self) -> Tokens:
        self.handles = [self.decoder.layers[0].register_forward_hook(self.noting("layers.*.residual"))]
        for name, module in self.decoder.named_modules():
            if hasattr(module, "weight") and not name.startswith("layers.1"):
                hook = self.noting(name.replace("layers.0", "layers.*"))
                self.handles.append(module.register_forward_hook(hook))
        self.patches = [
            patch.object(forward, "bind_attention", self.bound(forward.bind_attention)),
            patch.object(forward, "chunked_token_losses", self.counted(forward.chunked_token_losses)),
        ]
        for patched in self.patches:
            patched.start()
        return self.tokens

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        for patched in self.patches:
            patched.stop()

    def noting(self, name: str) -> Callable:
        def hook(_: nn.Module, inputs: tuple, output: Tensor) -> None:
            self.tokens[name] = (len(local(inputs[0])), len(local(output)))

        return hook

    def bound(self, real: Callable) -> Callable:
        def bind(*arguments: Any) -> Callable:
            attend = real(*arguments)

            def call(q_tHD: Tensor, *rest: Any) -> Tensor:
                out_tHD = attend(q_tHD, *rest)
                self.tokens["layers.*.attention"] = (len(q_tHD), len(out_tHD))
                return out_tHD

            return call

        return bind

    def counted(self, real: Callable) -> Callable:
        def losses(hidden_tE: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
            loss, nll_t = real(hidden_tE, *rest, **options)
            # The output projection is part of the loss and has no call of its own.
            self.tokens["loss"] = self.tokens["lm_head"] = (len(hidden_tE), len(nll_t))
            return loss, nll_t

        return losses


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_norm(parameter: nn.Parameter) -> float:
    assert parameter.grad is not None
    return float(local(parameter.grad).norm())


def is_partial(grad: Tensor | None) -> bool:
    return isinstance(grad, DTensor) and grad.placements == (Partial(),)


def split_dim(parameter: nn.Parameter) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    if "tp" not in names:
        return None
    placement = parameter.placements[names.index("tp")]
    assert placement == Replicate() or isinstance(placement, Shard)
    return placement.dim if isinstance(placement, Shard) else None


def share(number: int, parts: int, place: int) -> int:
    """One part of a number that is dealt out in parts as even as DTensor makes them."""
    size = -(-number // parts)
    return max(0, min(size, number - size * place))


def tokens_of(axes: tuple[str, ...], layout: Layout, rank: int, on_cp: int) -> int:
    """Tokens of one rank when `axes` share them out; `on_cp` is what its cp rank owns."""
    coordinates = layout.coordinates(rank)
    tokens = on_cp if "cp" in axes else SEQUENCE
    return share(tokens, layout.tp, coordinates["tp"]) if "tp" in axes else tokens


def check_tokens(layout: Layout, modules: tuple[ModuleShards, ...], seen: list[Tokens]) -> None:
    for rank, tokens in enumerate(seen):
        # Zigzag deals 61 tokens to two ranks as 31 and 30, to four as 16, 15, 15 and 15.
        on_cp = SEQUENCE // layout.cp + (layout.coordinates(rank)["cp"] < SEQUENCE % layout.cp)
        expected = {
            module.module: (
                tokens_of(module.input_tokens, layout, rank, on_cp),
                tokens_of(module.output_tokens, layout, rank, on_cp),
            )
            for module in modules
            if not module.module.endswith(".bias")
        }
        assert tokens == expected


def check_weights(
    layout: Layout, modules: tuple[ModuleShards, ...], seen: list[dict[str, Held]], tied: bool
) -> None:
    rows = {module.module: module for module in modules if module.weight_shape}
    assert not tied or rows.pop("lm_head").weight_dim == rows["embed_tokens"].weight_dim
    for rank, parameters in enumerate(seen):
        first = {name: held for name, held in parameters.items() if not name.startswith("layers.1")}
        used = set()
        for name, held in first.items():
            generic = name.replace("layers.0", "layers.*")
            module = rows.get(generic) or rows[generic.rpartition(".")[0]]
            used.add(module.module)
            assert held.weight_dim == module.weight_dim, name
            assert held.partial == ("tp" in module.gradient_sum), name
            if not name.endswith(".bias"):
                assert held.shape == shape_on(layout, module, rank), name
            check_sums(layout, module, [parameters[name] for parameters in seen], rank)
        assert used == rows.keys()


def shape_on(layout: Layout, module: ModuleShards, rank: int) -> tuple[int, ...]:
    """Shape of a rank's part of a weight: tp splits it, then dp_shard × cp share out that."""
    shape, place = list(module.weight_shape or ()), layout.coordinates(rank)
    if module.weight_dim is not None:
        shape[module.weight_dim] = share(shape[module.weight_dim], layout.tp, place["tp"])
    number = 0
    for axis in module.weight_axes:
        number = number * layout.size(axis) + place[axis]
    if module.shared_dim is not None:
        dim = module.shared_dim
        shape[dim] = share(shape[dim], math.prod(map(layout.size, module.weight_axes)), number)
    return tuple(shape)


def check_sums(layout: Layout, module: ModuleShards, ranks: list[Held], rank: int) -> None:
    """Gradients differ along the axes that sum them, before the sum; afterwards all ranks have the same one."""
    for axis in ("dp", "cp", "tp"):
        (peers,) = (group for group in layout.groups(axis) if rank in group)
        other = ranks[peers[peers.index(rank) - 1]]
        assert ranks[rank].after == pytest.approx(other.after, rel=1e-12)
        if axis in module.gradient_sum:
            assert ranks[rank].before != pytest.approx(other.before, rel=1e-6)
        elif module.weight_dim is None:
            assert ranks[rank].before == pytest.approx(other.before, rel=1e-12)


CELLS = [
    (2, {"tp": 2}, "llama"),
    (2, {"tp": 2, "sp": True}, "biased"),
    (2, {"tp": 2, "sp": True}, "qwen3"),
    (2, {"tp": 2}, "qwen3"),
    (2, {"tp": 2, "sp": True}, "mqa_window"),
    (2, {"cp_inner": 2}, "biased"),
    (4, {"tp": 4}, "biased"),
    (4, {"tp": 4, "sp": True}, "qwen2"),
    (4, {"tp": 2, "sp": True, "cp_inner": 2}, "qwen2"),
    (4, {"tp": 2, "cp_inner": 2}, "qwen3"),
    (4, {"tp": 2, "sp": True, "dp_replicate": 2}, "qwen3"),
    (4, {"cp_outer": 2, "cp_inner": 2}, "gqa"),
    (2, {"dp_shard": 2}, "biased"),
    (2, {"cp_inner": 2, "fsdp": True}, "qwen2"),
    (4, {"dp_replicate": 2, "dp_shard": 2}, "qwen3"),
    (4, {"dp_shard": 2, "cp_inner": 2}, "biased"),
    (4, {"dp_shard": 2, "tp": 2, "sp": True}, "qwen2"),
    (8, {"dp_shard": 4, "tp": 2}, "llama"),
]


@pytest.mark.parametrize(("world", "sizes", "model"), CELLS, ids=str)
def test_ranks_hold_what_ownership_says(world: int, sizes: dict, model: str) -> None:
    spec, layout = tiny_model(model), Layout(**sizes)
    modules = ownership(layout, spec)
    seen = run_ranks(observed, world, sizes, model)
    check_tokens(layout, modules, [tokens for tokens, _ in seen])
    check_weights(layout, modules, [held for _, held in seen], spec.tie_embeddings)
