"""torch's fused CPU attention.

It kills the process on empty q or k, aligns causal squares top-left and calls the log-sum-exp of a row that sees no key
0; the blocks that reach a kernel have none of these.
"""

import torch
from torch import Tensor

from longspan.attention.kernels.fused import Fused, widen
from longspan.attention.kernels.protocol import visible
from longspan.attention.score import Score
from longspan.spec.blocks import Block


class CpuFlash(Fused):
    """The fused operator takes GQA as it is; where head sizes of q and v differ, the smaller are filled with zeros."""

    name = "cpu_flash"
    device = "cpu"

    def _forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_batched((q_nHD, k_mKD, v_mKD)),
            0.0,
            block.shape == "causal",
            attn_mask=_additive_mask(block, q_nHD),
            scale=score.scale,
        )
        return out[0].transpose(0, 1)[..., : v_mKD.shape[-1]], lse[0].transpose(0, 1)

    def _backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_nHD, k_mKD, v_mKD, out_nHD, lse_nH = saved
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_batched((grad_nHD, q_nHD, k_mKD, v_mKD, out_nHD)),
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


def _batched(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """[n, H, D] to [1, H, n, D] of one head size; views where it is theirs."""
    return tuple(t.transpose(0, 1)[None] for t in widen(tensors))
