"""The attention engine: one autograd boundary around an `Exchange`, its steps and its trade of heads.

Between forward and backward only q, k, v, the output and the log-sum-exp are kept, of local tokens and all heads or, if
heads are traded, of all tokens and local heads.

Known shortfalls: no dropout and no double backward.

# t local tokens, H query heads, K key/value heads, D head size
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.heads import HeadMover
from longspan.attention.kernels import Kernel
from longspan.attention.meter import Meter
from longspan.attention.score import Score
from longspan.attention.steps import Gradients, Inputs, Runner, Saved, accumulation_dtype
from longspan.errors import UnsupportedError
from longspan.spec.exchange import Exchange

__all__ = ["AttentionCall", "attend"]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Everything about an attention call but its tensors.

    Attributes:
        exchange: this rank's program.
        kernel: computes the blocks.
        score: how scores are made.
        meter: tally of bytes, rounds, pairs and waiting.
        sequence: group of ranks in which the program's steps run, or None.
        heads: group of ranks that trade heads, or None.
        grad_dtype: dtype in which partial K/V gradients travel; None for the one they accumulate in, at least float32.
    """

    exchange: Exchange
    kernel: Kernel
    score: Score
    meter: Meter
    sequence: dist.ProcessGroup | None = None
    heads: dist.ProcessGroup | None = None
    grad_dtype: torch.dtype | None = None

    @property
    def runner(self) -> Runner:
        """What runs the steps."""
        return Runner(self.exchange, self.sequence, self.kernel, self.score, self.meter, self.grad_dtype)


def attend(
    q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, call: AttentionCall, sinks_H: Tensor | None = None
) -> Tensor:
    """Attention of this rank's queries over the keys of all cp ranks.

    Args:
        q_tHD: queries of the tokens that the sharding gives this rank, shape (t, H, D).
        k_tKD: their keys, shape (t, K, D); H is a multiple of K.
        v_tKD: their values, shape (t, K, Dv).
        call: program, groups, kernel and score. Every rank of the cp group calls with its own program.
        sinks_H: a learned score for each head that takes part in the softmax and has no value, shape (H,). Its
            gradient is this rank's summand: add up over the cp group.

    Returns:
        Output in the dtype of `q_tHD`, shape (t, H, Dv); rows that see no key cannot occur.

    Raises:
        UnsupportedError: tensors that do not fit the program, or that the kernel cannot take.
        ConfigError: fewer query heads than ranks that trade them.
    """
    _check(q_tHD, k_tKD, v_tKD, sinks_H, call)
    return _Attend.apply(q_tHD, k_tKD, v_tKD, sinks_H, call)


def _check(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, sinks_H: Tensor | None, call: AttentionCall) -> None:
    exchange, query, kv = call.exchange, q_tHD.shape[1], k_tKD.shape[1]
    if not len(q_tHD) == len(k_tKD) == len(v_tKD) == exchange.num_tokens:
        lengths = (len(q_tHD), len(k_tKD), len(v_tKD))
        raise UnsupportedError(
            f"attention got q, k, v of {lengths} tokens; this rank owns {exchange.num_tokens}"
        )
    if query % kv:
        raise UnsupportedError(f"{query} query heads are no multiple of {kv} key heads")
    if not q_tHD.dtype == k_tKD.dtype == v_tKD.dtype:
        raise UnsupportedError(
            f"q, k and v must have one dtype, got {q_tHD.dtype}, {k_tKD.dtype}, {v_tKD.dtype}"
        )
    if exchange.parts > min(len(part.kv) for part in exchange.head_slices(query, kv)):
        raise UnsupportedError(
            f"head_groups={exchange.parts} are more than the {kv} key/value heads; use fewer"
        )
    if sinks_H is not None and sinks_H.shape != (query,):
        raise UnsupportedError(f"sinks have shape {tuple(sinks_H.shape)}; there are {query} query heads")
    reason = call.kernel.refusal(q_tHD, v_tKD, call.score)
    if reason:
        raise UnsupportedError(reason)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> Tensor:
        inputs = Inputs(q.contiguous(), k.contiguous(), v.contiguous(), sinks)
        out, saved = _forward(inputs, call)
        ctx.save_for_backward(*(tensor for one in saved for tensor in (*one.inputs, one.out_tHD, one.lse_tH)))
        ctx.call, ctx.shapes = call, (q.shape, k.shape, v.shape)
        ctx.dtypes = (q.dtype, k.dtype, v.dtype, None if sinks is None else sinks.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        saved = [
            Saved(Inputs(q, k, v, sinks), out, lse)
            for q, k, v, sinks, out, lse in zip(*[tensors] * 6, strict=True)
        ]
        grads = _backward(saved, grad_out.contiguous(), ctx.shapes, ctx.call)
        return *(None if t is None else t.to(d) for t, d in zip(grads, ctx.dtypes, strict=True)), None


def _head_mover(call: AttentionCall, query: int, kv: int) -> HeadMover | None:
    if call.exchange.reshard is None:
        return None
    assert call.heads is not None
    return HeadMover(call.exchange.reshard, call.exchange.reshard.deal(query, kv), call.heads, call.meter)


def _forward(inputs: Inputs, call: AttentionCall) -> tuple[Tensor, list[Saved]]:
    """Output of own tokens, and what backward needs: of one run of the steps, or of one for each chunk of heads."""
    query, v_dim = inputs.q_tHD.shape[1], inputs.v_tKD.shape[-1]
    mover = _head_mover(call, query, inputs.k_tKD.shape[1])
    if mover is None:
        saved = call.runner.forward(inputs)
        return saved.out_tHD, [saved]
    out_tHD = inputs.q_tHD.new_empty(len(inputs.q_tHD), query, v_dim)
    kept, returning = list[Saved](), []
    arriving = mover.inputs_to_heads(0, inputs)
    for chunk in range(len(mover.chunks)):
        own = arriving()
        if chunk + 1 < len(mover.chunks):
            arriving = mover.inputs_to_heads(chunk + 1, inputs)
        kept.append(call.runner.forward(own))
        returning.append(mover.output_to_tokens(chunk, kept[-1].out_tHD, out_tHD))
    for wait in returning:
        wait()
    return out_tHD, kept


def _backward(
    saved: list[Saved], grad_tHD: Tensor, shapes: tuple[torch.Size, ...], call: AttentionCall
) -> Gradients:
    mover = _head_mover(call, shapes[0][1], shapes[1][1])
    if mover is None:
        return call.runner.backward(saved[0], grad_tHD)
    wide = accumulation_dtype(grad_tHD)
    dq_tHD, dk_tKD, dv_tKD = (grad_tHD.new_zeros(shape, dtype=wide) for shape in shapes)
    total = Gradients(dq_tHD, dk_tKD, dv_tKD, _zero_sinks(saved, shapes))
    repeats = mover.reshard.repeats(shapes[0][1], shapes[1][1])
    dtype = (call.grad_dtype or wide) if repeats else grad_tHD.dtype
    returning, arriving = [], mover.gradient_to_heads(0, grad_tHD)
    for chunk, one in enumerate(saved):
        own_grad = arriving()
        if chunk + 1 < len(saved):
            arriving = mover.gradient_to_heads(chunk + 1, grad_tHD)
        returning.append(mover.gradients_to_tokens(chunk, call.runner.backward(one, own_grad), total, dtype))
    for wait in returning:
        wait()
    return total


def _zero_sinks(saved: list[Saved], shapes: tuple[torch.Size, ...]) -> Tensor | None:
    if saved[0].inputs.sinks_H is None:
        return None
    return saved[0].lse_tH.new_zeros(shapes[0][1])
