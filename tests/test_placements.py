"""What `ownership` says of a layout is what the ranks really hold: tokens, weights and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from longspan.attention import Meter, choose_kernel
from longspan.model import InitialWeights
from longspan.spec.layout import Layout
from longspan.spec.ownership import ModuleShards, ownership
from longspan.testing import run_ranks
from longspan.train import forward
from longspan.train.context_parallel import ContextParallel
from longspan.train.forward import ParallelModel, prepare
from longspan.train.gradients import sum_gradients
from longspan.train.parallelize import ModelOptions, build_model
from tests.train.parity import SEQUENCE, batches, groups, tiny_model

Tokens = dict[str, tuple[int, int]]
"""Tokens that one rank sees of a module's input and output, by the module's name."""


@dataclass
class Held:
    """What one rank holds of one parameter.

    Attributes:
        weight_dim: the dimension that its DTensor splits, or None.
        shape: shape of the local part.
        partial: whether the gradient comes out of backward as one summand of tp.
        before: norm of this rank's gradient as backward leaves it.
        after: the same once the gradient rule has summed it.
    """

    weight_dim: int | None
    shape: tuple[int, ...]
    partial: bool
    before: float
    after: float


def observed(rank: int, world: int, sizes: dict, model: str) -> tuple[Tokens, dict[str, Held]]:
    """One forward and backward pass, watched from outside."""
    spec, layout = tiny_model(model), Layout(**sizes)
    group = groups(layout)
    decoder = build_model(spec, InitialWeights(spec, 0), group, ModelOptions(torch.float64, torch.float64))
    kernel = choose_kernel("auto", "cpu", torch.float64)
    parallel = ParallelModel(decoder, group, kernel, Meter(), loss_chunk=16)
    context = ContextParallel(layout.cp, group.coordinate("cp"), "zigzag", "ring")
    batch = batches("crossing", layout.dp)[group.coordinate("dp")]
    micro = prepare(batch, tuple(spec.window_layers), context)
    with Watched(decoder) as tokens:
        loss, _ = parallel.token_losses(micro, batch.num_targets)
    loss.backward()
    before = {name: local_norm(p) for name, p in decoder.named_parameters()}
    partial = {name: is_partial(p.grad) for name, p in decoder.named_parameters()}
    sum_gradients(parallel.parameters(), group, parallel.meter)
    held = {
        name: Held(split_dim(p), tuple(local(p).shape), partial[name], before[name], local_norm(p))
        for name, p in decoder.named_parameters()
    }
    return tokens, held


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
    (placement,) = parameter.placements
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
                shape = list(module.weight_shape or ())
                if module.weight_dim is not None:
                    dim = module.weight_dim
                    shape[dim] = share(shape[dim], layout.tp, layout.coordinates(rank)["tp"])
                assert held.shape == tuple(shape), name
            check_sums(layout, module, [parameters[name] for parameters in seen], rank)
        assert used == rows.keys()


def check_sums(layout: Layout, module: ModuleShards, ranks: list[Held], rank: int) -> None:
    """Gradients differ along the axes that sum them, before the sum; afterwards they agree there."""
    for axis in ("dp", "cp", "tp"):
        (peers,) = (group for group in layout.groups(axis) if rank in group)
        other = ranks[peers[peers.index(rank) - 1]]
        if axis in module.gradient_sum:
            assert ranks[rank].before != pytest.approx(other.before, rel=1e-6)
            assert ranks[rank].after == pytest.approx(other.after, rel=1e-12)
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
]


@pytest.mark.parametrize(("world", "sizes", "model"), CELLS, ids=str)
def test_ranks_hold_what_ownership_says(world: int, sizes: dict, model: str) -> None:
    spec, layout = tiny_model(model), Layout(**sizes)
    modules = ownership(layout, spec)
    seen = run_ranks(observed, world, sizes, model)
    check_tokens(layout, modules, [tokens for tokens, _ in seen])
    check_weights(layout, modules, [held for _, held in seen], spec.tie_embeddings)
