"""The attention engine: runs an `Exchange` on this rank's tensors, forward and backward.

Blockwise softmax is exact: each block gives its output and log-sum-exp, and two partial results merge by their
log-sum-exp (arXiv 2112.05682; FlashAttention, arXiv 2205.14135, algorithm 1). In backward the log-sum-exp of the whole
row makes each block's gradients exact parts of the whole. Output, log-sum-exp and all gradients accumulate in at least
float32. Between forward and backward only q, k, v, the output and the log-sum-exp of local tokens are kept.

Known shortfalls: softmax attention with a scale only (no softcap, sinks or dropout), and no double backward.

# t local tokens, n/m rows of a block, H query heads, K key/value heads, D head size
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.kernels import Kernel
from longspan.attention.meter import Meter
from longspan.attention.transport import Held, Mover
from longspan.errors import UnsupportedError
from longspan.spec.exchange import Exchange, Work

__all__ = ["AttentionCall", "attend"]


@dataclass(frozen=True)
class AttentionCall:
    """Everything about an attention call but its tensors.

    Attributes:
        exchange: this rank's program.
        group: the cp process group, or None when cp is 1.
        kernel: computes the blocks.
        scale: factor of the scores, usually 1/√D.
        meter: tally of bytes, rounds, pairs and waiting.
    """

    exchange: Exchange
    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    meter: Meter


def attend(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, call: AttentionCall) -> Tensor:
    """Attention of this rank's queries over the keys of all cp ranks.

    Args:
        q_tHD: queries of the tokens that the sharding gives this rank, shape (t, H, D).
        k_tKD: their keys, shape (t, K, D); H is a multiple of K.
        v_tKD: their values, shape (t, K, D).
        call: program, group, kernel and scale. Every rank of the group calls with its own program.

    Returns:
        Output in the dtype of `q_tHD`, shape (t, H, D); rows that see no key cannot occur.

    Raises:
        UnsupportedError: tensors that do not fit the program, or that the kernel cannot take.
    """
    _check(q_tHD, k_tKD, v_tKD, call)
    return _Attend.apply(q_tHD, k_tKD, v_tKD, call)


def _check(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, call: AttentionCall) -> None:
    tokens = call.exchange.num_rows[call.exchange.rank]
    if not len(q_tHD) == len(k_tKD) == len(v_tKD) == tokens:
        lengths = (len(q_tHD), len(k_tKD), len(v_tKD))
        raise UnsupportedError(f"attention got q, k, v of {lengths} tokens; this rank owns {tokens}")
    if q_tHD.shape[1] % k_tKD.shape[1]:
        raise UnsupportedError(f"{q_tHD.shape[1]} query heads are no multiple of {k_tKD.shape[1]} key heads")
    reason = call.kernel.refusal(q_tHD, v_tKD)
    if reason:
        raise UnsupportedError(reason)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = _forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *_backward(ctx.saved_tensors, grad_out.contiguous(), ctx.call), None


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _own_rows(call: AttentionCall, k: Tensor, v: Tensor) -> dict[int, Held]:
    return {call.exchange.rank: Held(((0, len(k)),) if len(k) else (), k, v)}


def _forward(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    wide = _accumulation_dtype(q_tHD)
    out_tHD = q_tHD.new_zeros((*q_tHD.shape[:2], v_tKD.shape[-1]), dtype=wide)
    lse_tH = q_tHD.new_full(q_tHD.shape[:2], float("-inf"), dtype=wide)
    own = _own_rows(call, k_tKD, v_tKD)
    mover, held = Mover(call.exchange, call.group, call.meter), own
    for step in call.exchange.forward:
        arriving = mover.post(step, held, {})
        for work in step.work:
            _attend_to(work, q_tHD, held, (out_tHD, lse_tH), call)
        held = own | {source: rows for (_, source, _), rows in arriving().items()}
    return out_tHD.to(q_tHD.dtype), lse_tH


def _attend_to(
    work: Work, q_tHD: Tensor, held: dict[int, Held], result: tuple[Tensor, Tensor], call: AttentionCall
) -> None:
    """Merge the blocks of one source into the running output and log-sum-exp."""
    if not work.blocks:
        return
    _, k_mKD, v_mKD = held[work.source]
    for block in work.blocks:
        queries, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        out_nHD, lse_nH = call.kernel.forward(q_tHD[queries], k_mKD[keys], v_mKD[keys], block, call.scale)
        merge_into(result[0][queries], result[1][queries], out_nHD, lse_nH)
        call.meter.pairs += block.pairs


def merge_into(out_nHD: Tensor, lse_nH: Tensor, part_nHD: Tensor, part_lse_nH: Tensor) -> None:
    """Merge a partial result into a running one, in place.

    Args:
        out_nHD: running output, shape (n, H, D), zero where nothing was merged yet.
        lse_nH: running log-sum-exp, shape (n, H), -inf there.
        part_nHD: output over other keys; its log-sum-exp is finite.
        part_lse_nH: that log-sum-exp, shape (n, H).
    """
    merged_nH = torch.logaddexp(lse_nH, part_lse_nH)
    weight_nH1 = (part_lse_nH - merged_nH).exp().unsqueeze(-1)
    out_nHD.lerp_(part_nHD.to(out_nHD.dtype), weight_nH1)
    lse_nH.copy_(merged_nH)


def _backward(
    saved: tuple[Tensor, ...], grad_tHD: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    q_tHD, k_tKD, v_tKD, _, _ = saved
    wide, rank = _accumulation_dtype(q_tHD), call.exchange.rank
    dq_tHD = torch.zeros_like(q_tHD, dtype=wide)
    own = _own_rows(call, k_tKD, v_tKD)
    mover, held, grads = Mover(call.exchange, call.group, call.meter), own, _zeros(own, wide)
    for step in call.exchange.backward:
        arriving = mover.post(step, held, grads)
        leaving = {move.source for move in step.sends if move.what == "grad"}
        for work in step.work:
            if work.source not in grads:
                grads |= _zeros({work.source: held[work.source]}, wide)
            _backward_through(work, saved, grad_tHD, held, (dq_tHD, grads), call)
        arrived = arriving()
        for source in leaving:
            del grads[source]
        _add_arrived(grads, {key: rows for key, rows in arrived.items() if key[0] == "grad"})
        held = own | {source: rows for (what, source, _), rows in arrived.items() if what == "kv"}
    return dq_tHD.to(q_tHD.dtype), grads[rank].k_mKD.to(k_tKD.dtype), grads[rank].v_mKD.to(v_tKD.dtype)


def _zeros(held: dict[int, Held], dtype: torch.dtype) -> dict[int, Held]:
    return {
        source: Held(rows, torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
        for source, (rows, k, v) in held.items()
    }


def _backward_through(
    work: Work,
    saved: tuple[Tensor, ...],
    grad_tHD: Tensor,
    held: dict[int, Held],
    result: tuple[Tensor, dict[int, Held]],
    call: AttentionCall,
) -> None:
    """Add the gradients of one source's blocks to dQ and to the source's dK and dV."""
    if not work.blocks:
        return
    q_tHD, _, _, out_tHD, lse_tH = saved
    _, k_mKD, v_mKD = held[work.source]
    dq_tHD, grads = result
    for block in work.blocks:
        queries, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        parts = (q_tHD[queries], k_mKD[keys], v_mKD[keys], out_tHD[queries], lse_tH[queries])
        dq_nHD, dk_mKD, dv_mKD = call.kernel.backward(parts, grad_tHD[queries], block, call.scale)
        dq_tHD[queries] += dq_nHD
        grads[work.source].k_mKD[keys] += dk_mKD
        grads[work.source].v_mKD[keys] += dv_mKD


def _add_arrived(grads: dict[int, Held], arrived: dict[tuple[str, int, int], Held]) -> None:
    for (_, source, _), part in arrived.items():
        targets = grads[source].pick(part.rows)
        values = part.pick(part.rows)
        for target, value in zip(targets, values, strict=True):
            target += value
