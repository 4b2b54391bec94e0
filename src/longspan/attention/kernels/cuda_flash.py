"""torch's CUDA flash attention, for float16 and bfloat16."""

import torch
from torch import Tensor

from longspan.attention.kernels.protocol import flipped_causal, widen
from longspan.attention.kernels.reference import Reference
from longspan.attention.score import Score
from longspan.spec.blocks import Block


class CudaFlash:
    """The fused operator; the smaller of unequal head sizes is filled with zeros. Narrow bands go to `Reference`."""

    name = "cuda_flash"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor, score: Score) -> str | None:
        """Refuse other devices and dtypes, and capped scores."""
        if q_tHD.device.type != "cuda":
            return f"cuda_flash runs on cuda tensors, got {q_tHD.device.type}"
        if q_tHD.dtype not in (torch.float16, torch.bfloat16):
            return f"cuda_flash takes float16 and bfloat16, got {q_tHD.dtype}; use kernel='reference'"
        if score.softcap is not None:
            return f"cuda_flash cannot cap scores (softcap={score.softcap}); use kernel='flash_attn' or 'reference'"
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if block.shape == "band":
            return Reference().forward(q_nHD, k_mKD, v_mKD, block, score)
        if block.shape == "anticausal":
            out, lse = self.forward(q_nHD.flip(0), k_mKD.flip(0), v_mKD.flip(0), flipped_causal(block), score)
            return out.flip(0), lse.flip(0)
        size = max(q_nHD.shape[-1], v_mKD.shape[-1])
        q, k, v = (widen(t, size)[None] for t in (q_nHD, k_mKD, v_mKD))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, len(q_nHD), len(k_mKD),
            0.0, block.shape == "causal", False, scale=score.scale,
        )  # fmt: skip
        return out[0, ..., : v_mKD.shape[-1]], lse[0].transpose(0, 1)

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        if block.shape == "band":
            return Reference().backward(saved, grad_nHD, block, score)
        if block.shape == "anticausal":
            flipped = tuple(t.flip(0) for t in saved)
            dq, dk, dv = self.backward(flipped, grad_nHD.flip(0), flipped_causal(block), score)
            return dq.flip(0), dk.flip(0), dv.flip(0)
        lse_nH, dims = saved[-1], [t.shape[-1] for t in saved[:3]]
        grad, q, k, v, out = (widen(t, max(dims))[None].contiguous() for t in (grad_nHD, *saved[:-1]))
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out,
            lse_nH.transpose(0, 1)[None].contiguous(), None, None, q.shape[1], k.shape[1],
            0.0, block.shape == "causal", no_dropout, no_dropout, scale=score.scale,
        )  # fmt: skip
        d_q, d_k, d_v = (t[0, ..., :dim] for t, dim in zip((dq, dk, dv), dims, strict=True))
        return d_q, d_k, d_v
