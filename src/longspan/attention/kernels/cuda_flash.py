"""torch's CUDA flash attention, for float16 and bfloat16."""

import torch
from torch import Tensor

from longspan.attention.kernels.fused import Fused, widen
from longspan.attention.kernels.reference import Reference
from longspan.attention.score import Score
from longspan.spec.blocks import Block


class CudaFlash(Fused):
    """The fused operator; the smaller of unequal head sizes is filled with zeros. Narrow bands go to `Reference`."""

    name = "cuda_flash"
    device = "cuda"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor, score: Score) -> str | None:
        """Refuse other devices and dtypes, and capped scores."""
        if reason := super().refusal(q_tHD, v_tKD, score):
            return reason
        if q_tHD.dtype not in (torch.float16, torch.bfloat16):
            return f"cuda_flash takes float16 and bfloat16, got {q_tHD.dtype}; use kernel='reference'"
        return None

    def _forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        if block.shape == "band":
            return Reference().forward(q_nHD, k_mKD, v_mKD, block, score)
        q, k, v = (t[None] for t in widen((q_nHD, k_mKD, v_mKD)))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, len(q_nHD), len(k_mKD),
            0.0, block.shape == "causal", False, scale=score.scale,
        )  # fmt: skip
        return out[0, ..., : v_mKD.shape[-1]], lse[0].transpose(0, 1)

    def _backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        if block.shape == "band":
            return Reference().backward(saved, grad_nHD, block, score)
        lse_nH, dims = saved[-1], [t.shape[-1] for t in saved[:3]]
        grad, q, k, v, out = (t[None].contiguous() for t in widen((grad_nHD, *saved[:-1])))
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out,
            lse_nH.transpose(0, 1)[None].contiguous(), None, None, q.shape[1], k.shape[1],
            0.0, block.shape == "causal", no_dropout, no_dropout, scale=score.scale,
        )  # fmt: skip
        d_q, d_k, d_v = (t[0, ..., :dim] for t, dim in zip((dq, dk, dv), dims, strict=True))
        return d_q, d_k, d_v
