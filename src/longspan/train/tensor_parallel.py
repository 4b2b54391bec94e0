"""Tensor parallelism with DTensor, and sequence parallelism as the placement of the residual stream.

Heads, MLP width and vocabulary are split over tp (arXiv 1909.08053); the residual stream is a DTensor, replicated under
plain TP and split over tokens under SP (arXiv 2205.05198), so lengths that tp does not divide need no padding.
Gradients of weights that every tp rank holds whole (norms under SP, QK-norms, shared K/V heads) come out as `Partial`
and are summed over tp before the optimizer sees them (see `gradients`).

# t tokens of this cp rank, E hidden size, D head size
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longspan.model import Decoder
from longspan.spec.model import ModelSpec

__all__ = ["apply_tensor_parallel", "local_hidden"]

TOKENS, HEADS = 0, 1


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh, sp: bool) -> None:
    """Split the weights of `decoder` over `mesh`, in place.

    Args:
        decoder: the model; its parameters become DTensors.
        mesh: the tp ranks.
        sp: also split the tokens of embedding output, norms and residual stream over the same ranks.
    """
    stream = Shard(TOKENS) if sp else Replicate()
    parallelize_module(decoder, mesh, {"embed_tokens": _rows(stream, Replicate()), "norm": _Whole()})
    for layer in decoder.layers:
        parallelize_module(layer, mesh, _layer_plan(decoder.spec, mesh.size(), stream))
    if decoder.lm_head is not None:
        parallelize_module(decoder, mesh, {"lm_head": ColwiseParallel()})


def _layer_plan(spec: ModelSpec, tp: int, stream: Shard | Replicate) -> dict[str, ParallelStyle]:
    key_value = ColwiseParallel() if spec.num_kv_heads >= tp else _SharedHeads(spec.num_kv_heads)
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": _Whole(),
        "self_attn": _AllTokens(),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": key_value,
        "self_attn.v_proj": key_value,
        "self_attn.o_proj": _rows(stream),
        "post_attention_layernorm": _Whole(),
        "mlp": _AllTokens(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": _rows(stream),
    }
    if spec.qk_norm:
        # Heads take the place of the sequence: each rank normalises its own, the shared weight's gradient is summed.
        plan["self_attn.q_norm"] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        plan["self_attn.k_norm"] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    return plan


def _rows(stream: Shard | Replicate, inputs: Shard | Replicate | None = None) -> RowwiseParallel:
    return RowwiseParallel(input_layouts=inputs, output_layouts=stream, use_local_output=False)


def local_hidden(hidden_tE: Tensor) -> Tensor:
    """All of this cp rank's hidden states as a plain tensor, shape (t, E), for a loss split over the vocabulary.

    Each tp rank's loss sees its own vocabulary rows, so the gradient that comes back is one summand of tp.
    """
    if not isinstance(hidden_tE, DTensor):
        return hidden_tE
    return _GatherTokens.apply(hidden_tE).to_local(grad_placements=[Partial()])


class _GatherTokens(torch.autograd.Function):
    """Stream to all tokens; backward sums the tp ranks' gradients and puts them back as the stream is placed.

    DTensor's own redistribution from Replicate to Replicate would let a Partial gradient pass.
    """

    @staticmethod
    def forward(ctx: Any, stream_tE: DTensor) -> DTensor:
        ctx.placements = stream_tE.placements
        return stream_tE.redistribute(placements=[Replicate()])

    @staticmethod
    def backward(ctx: Any, grad_tE: DTensor) -> DTensor:
        return grad_tE.redistribute(placements=ctx.placements)


class _AllTokens(ParallelStyle):
    """The module's first input is gathered: its weights are split, and it needs every token of the cp rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (_GatherTokens.apply(inputs[0]), *inputs[1:]))
        return module


class _Whole(ParallelStyle):
    """Every rank holds the whole weight and applies it to the stream as it is placed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class _SharedHeads(ParallelStyle):
    """K/V projections with fewer heads than ranks: each holds the whole, small weight and uses one head of it."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        head = device_mesh.get_local_rank() * self.num_heads // device_mesh.size()

        def own_head(tensor: Any, dtype: torch.dtype) -> Tensor:
            """Rows of this rank's head; the other ranks' gradients are further summands."""
            return (
                tensor.to_local(grad_placements=[Partial()])
                .unflatten(0, (self.num_heads, -1))[head]
                .to(dtype)
            )

        def project(x_tE: DTensor) -> Tensor:
            local_tE = x_tE.to_local(grad_placements=[Partial()])
            bias = None if module.bias is None else own_head(module.bias, x_tE.dtype)
            return F.linear(local_tE, own_head(module.weight, x_tE.dtype), bias)

        module = distribute_module(module, device_mesh)
        module.forward = project
        return module
