"""Running the steps of an `Exchange` on this rank's tensors, forward and backward.

Blockwise softmax is exact: each block gives its output and log-sum-exp, and two partial results merge by their
log-sum-exp (arXiv 2112.05682; FlashAttention, arXiv 2205.14135, algorithm 1). In backward the log-sum-exp of the whole
row makes each block's gradients exact parts of the whole. Output, log-sum-exp and all gradients accumulate in at least
float32.

# t tokens of this group member, n/m rows of a block, H query heads, K key/value heads, D head size
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.held import Held, Key, find
from longspan.attention.kernels import Kernel
from longspan.attention.meter import Meter
from longspan.attention.score import Score
from longspan.attention.transport import Arrived, Mover
from longspan.spec.exchange import Exchange, Work
from longspan.spec.exchange.heads import kv_part


class Inputs(NamedTuple):
    """One call's tensors on this rank: q [t, H, D], k and v [t, K, D], sinks [H] or None."""

    q_tHD: Tensor
    k_tKD: Tensor
    v_tKD: Tensor
    sinks_H: Tensor | None


class Saved(NamedTuple):
    """What backward needs of a forward pass: inputs, output [t, H, D] and log-sum-exp [t, H] of whole rows."""

    inputs: Inputs
    out_tHD: Tensor
    lse_tH: Tensor


class Gradients(NamedTuple):
    """Gradients of the inputs, accumulated in at least float32."""

    q_tHD: Tensor
    k_tKD: Tensor
    v_tKD: Tensor
    sinks_H: Tensor | None


@dataclass(frozen=True)
class Runner:
    """Runs one exchange's steps.

    Args:
        exchange: this rank's program.
        group: process group of its steps, or None for one rank.
        kernel: computes the blocks.
        score: how scores are made.
        meter: tally of bytes, rounds, pairs and waiting.
        grad_dtype: dtype in which K/V gradients travel; None for the one they accumulate in.
    """

    exchange: Exchange
    group: dist.ProcessGroup | None
    kernel: Kernel
    score: Score
    meter: Meter
    grad_dtype: torch.dtype | None = None

    def forward(self, inputs: Inputs) -> Saved:
        """Attention of this rank's queries over the rows of all sources."""
        q_tHD, k_tKD, v_tKD, sinks_H = inputs
        wide = accumulation_dtype(q_tHD)
        out_tHD = q_tHD.new_zeros((*q_tHD.shape[:2], v_tKD.shape[-1]), dtype=wide)
        lse_tH = q_tHD.new_full(q_tHD.shape[:2], float("-inf"), dtype=wide)
        own = self._own(k_tKD, v_tKD)
        mover, held = self._mover(), own
        for step in self.exchange.forward:
            arriving = mover.post(step, held, {})
            for work in step.work:
                heads = _query_heads(inputs, work, self.exchange.parts)
                self._attend(work, q_tHD[:, heads], held, (out_tHD[:, heads], lse_tH[:, heads]))
            held = own | _arrived("kv", arriving())
        if sinks_H is not None:
            _add_sinks(out_tHD, lse_tH, sinks_H.to(wide))
        return Saved(inputs, out_tHD.to(q_tHD.dtype), lse_tH)

    def backward(self, saved: Saved, grad_tHD: Tensor) -> Gradients:
        """Gradients of this rank's inputs, from that of its output [t, H, D]."""
        (q_tHD, k_tKD, v_tKD, sinks_H), out_tHD, lse_tH = saved
        wide, rank = accumulation_dtype(q_tHD), self.exchange.rank
        dq_tHD = torch.zeros_like(q_tHD, dtype=wide)
        own = self._own(k_tKD, v_tKD)
        mover, held, grads = self._mover(), own, _zeros(own, wide)
        for step in self.exchange.backward:
            arriving = mover.post(step, held, grads)
            leaving = {(m.source, m.part) for m in step.sends if m.what == "grad"}
            for work in step.work:
                key, heads = (work.source, work.part), _query_heads(saved.inputs, work, self.exchange.parts)
                if key not in grads:
                    grads |= _zeros({key: held[key]}, wide)
                parts = tuple(t[:, heads] for t in (q_tHD, out_tHD, lse_tH, grad_tHD))
                self._backward_through(work, parts, held, (dq_tHD[:, heads], grads))
            arrived = arriving()
            for key in leaving:
                grads.pop(key, None)
            self._add(grads, arrived)
            held = own | _arrived("kv", arrived)
        dsinks_H = None if sinks_H is None else _sink_gradient(saved, grad_tHD)
        return Gradients(dq_tHD, grads[rank, None].k_mKD, grads[rank, None].v_mKD, dsinks_H)

    def _mover(self) -> Mover:
        return Mover(self.exchange, self.group, self.meter, self.grad_dtype)

    def _own(self, k_tKD: Tensor, v_tKD: Tensor) -> dict[Key, Held]:
        return {(self.exchange.rank, None): Held(((0, len(k_tKD)),) if len(k_tKD) else (), k_tKD, v_tKD)}

    def _attend(
        self, work: Work, q_tHD: Tensor, held: dict[Key, Held], result: tuple[Tensor, Tensor]
    ) -> None:
        """Merge the blocks of one source into the running output and log-sum-exp."""
        if not work.blocks:
            return
        _, k_mKD, v_mKD = held[work.source, work.part]
        for block in work.blocks:
            queries, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
            out_nHD, lse_nH = self.kernel.forward(q_tHD[queries], k_mKD[keys], v_mKD[keys], block, self.score)
            merge_into(result[0][queries], result[1][queries], out_nHD, lse_nH)
            self.meter.pairs += block.pairs * q_tHD.shape[1]

    def _backward_through(
        self,
        work: Work,
        parts: tuple[Tensor, ...],
        held: dict[Key, Held],
        result: tuple[Tensor, dict[Key, Held]],
    ) -> None:
        """Add the gradients of one source's blocks to dQ and to the source's dK and dV."""
        if not work.blocks:
            return
        q_tHD, out_tHD, lse_tH, grad_tHD = parts
        _, k_mKD, v_mKD = held[work.source, work.part]
        dq_tHD, grads = result
        _, dk_mKD, dv_mKD = grads[work.source, work.part]
        for block in work.blocks:
            queries, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
            saved = (q_tHD[queries], k_mKD[keys], v_mKD[keys], out_tHD[queries], lse_tH[queries])
            dq_nHD, dk_nKD, dv_nKD = self.kernel.backward(saved, grad_tHD[queries], block, self.score)
            dq_tHD[queries] += dq_nHD
            dk_mKD[keys] += dk_nKD
            dv_mKD[keys] += dv_nKD

    def _add(self, grads: dict[Key, Held], arrived: Arrived) -> None:
        """Add gradients that came from other ranks to those held of the same rows."""
        for (what, source, _, part), rows in arrived.items():
            if what != "grad":
                continue
            targets = find(grads, (source, part), self.exchange.parts).pick(rows.rows)
            for target, value in zip(targets, rows.pick(rows.rows), strict=True):
                target += value


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


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


def _add_sinks(out_tHD: Tensor, lse_tH: Tensor, sinks_H: Tensor) -> None:
    """Let each head's sink take its share of the softmax and give nothing for it (arXiv 2309.17453), in place."""
    with_sink_tH = torch.logaddexp(lse_tH, sinks_H)
    out_tHD *= (lse_tH - with_sink_tH).exp().unsqueeze(-1)
    lse_tH.copy_(with_sink_tH)


def _sink_gradient(saved: Saved, grad_tHD: Tensor) -> Tensor:
    """Gradient of the sinks from this rank's queries: -(the sink's share) · (output · its gradient), summed."""
    wide, sinks_H = saved.lse_tH.dtype, saved.inputs.sinks_H
    assert sinks_H is not None
    share_tH = (sinks_H.to(wide) - saved.lse_tH).exp()
    return -(share_tH * (saved.out_tHD.to(wide) * grad_tHD.to(wide)).sum(-1)).sum(0)


def _query_heads(inputs: Inputs, work: Work, parts: int) -> slice:
    """Query heads that use a work's group of K/V heads."""
    if work.part is None:
        return slice(None)
    kv = inputs.k_tKD.shape[1]
    own, group = kv_part(kv, work.part, parts), inputs.q_tHD.shape[1] // kv
    return slice(own.start * group, own.stop * group)


def _zeros(held: dict[Key, Held], dtype: torch.dtype) -> dict[Key, Held]:
    return {
        key: Held(rows, torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
        for key, (rows, k, v) in held.items()
    }


def _arrived(wanted: str, arrived: Arrived) -> dict[Key, Held]:
    return {(source, part): rows for (what, source, _, part), rows in arrived.items() if what == wanted}
