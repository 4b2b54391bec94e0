"""torch's fused CPU attention.

It kills the process on empty q or k, aligns causal squares top-left and calls the log-sum-exp of a row that sees no key
0; the blocks that reach a kernel have none of these.
"""

import torch
from torch import Tensor

from longspan.attention.kernels.protocol import flipped_causal, visible, widen
from longspan.attention.score import Score
from longspan.spec.blocks import Block


class CpuFlash:
    """The fused operator takes GQA as it is; where head sizes of q and v differ, the smaller are filled with zeros."""

    name = "cpu_flash"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor, score: Score) -> str | None:
        """Refuse other devices, and capped scores."""
        if q_tHD.device.type != "cpu":
            return f"cpu_flash runs on cpu tensors, got {q_tHD.device.type}"
        if score.softcap is not None:
            return f"cpu_flash cannot cap scores (softcap={score.softcap}); use kernel='reference'"
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if block.shape == "anticausal":
            flipped = flipped_causal(block)
            out, lse = self.forward(q_nHD.flip(0), k_mKD.flip(0), v_mKD.flip(0), flipped, score)
            return out.flip(0), lse.flip(0)
        size = max(q_nHD.shape[-1], v_mKD.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_batched((q_nHD, k_mKD, v_mKD), size),
            0.0,
            block.shape == "causal",
            attn_mask=_additive_mask(block, q_nHD),
            scale=score.scale,
        )
        return out[0].transpose(0, 1)[..., : v_mKD.shape[-1]], lse[0].transpose(0, 1)

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        if block.shape == "anticausal":
            flipped = tuple(t.flip(0) for t in saved)
            dq, dk, dv = self.backward(flipped, grad_nHD.flip(0), flipped_causal(block), score)
            return dq.flip(0), dk.flip(0), dv.flip(0)
        q_nHD, k_mKD, v_mKD, out_nHD, lse_nH = saved
        size = max(q_nHD.shape[-1], v_mKD.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_batched((grad_nHD, q_nHD, k_mKD, v_mKD, out_nHD), size),
            lse_nH.transpose(0, 1)[None],
            0.0,
            block.shape == "causal",
            attn_mask=_additive_mask(block, q_nHD),
            scale=score.scale,
        )
        dims = (q_nHD.shape[-1], k_mKD.shape[-1], v_mKD.shape[-1])
        d_q, d_k, d_v = (t[0].transpose(0, 1)[..., :dim] for t, dim in zip((dq, dk, dv), dims, strict=True))
        return d_q, d_k, d_v


def _additive_mask(block: Block, like: Tensor) -> Tensor | None:
    """0 for pairs and -inf elsewhere [n, m]; only narrow bands need one."""
    if block.shape != "band":
        return None
    seen = visible(block, slice(0, block.q_stop - block.q_start), like.device)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, float("-inf"))


def _batched(tensors: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
    """[n, H, D] to [1, H, n, size]; views where D is the size."""
    return tuple(widen(t, size).transpose(0, 1)[None] for t in tensors)
