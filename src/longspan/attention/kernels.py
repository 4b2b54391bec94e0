"""Block kernels: exact attention of one block, with its log-sum-exp, behind one protocol.

# n queries, m keys, H query heads, K key/value heads (H a multiple of K, never expanded in memory), D head size
"""

from typing import Protocol

import torch
from torch import Tensor

from longspan.errors import UnsupportedError
from longspan.spec.blocks import Block

__all__ = ["CpuFlash", "CudaFlash", "Kernel", "Reference", "choose_kernel"]


class Kernel(Protocol):
    """Forward and backward of one block; empty blocks and rows that see no key never reach a kernel."""

    name: str

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor) -> str | None:
        """Why this kernel cannot take such tensors, or None."""

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [n, H, D] in the input dtype and log-sum-exp [n, H] in at least float32."""

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [n, H, D], k and v [m, K, D].

        Args:
            saved: q, k, v of the block, and output [n, H, D] and log-sum-exp [n, H] of the *whole* row, which make
                the block's gradients exact parts of the whole.
            grad_nHD: gradient of the whole output.
            block: the block's shape.
            scale: factor of the scores.
        """


class CpuFlash:
    """torch's fused CPU attention. It takes GQA as it is, needs equal head sizes of q and v."""

    name = "cpu_flash"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor) -> str | None:
        """Refuse other devices and unequal head sizes."""
        if q_tHD.device.type != "cpu":
            return f"cpu_flash runs on cpu tensors, got {q_tHD.device.type}"
        if q_tHD.shape[-1] != v_tKD.shape[-1]:
            return f"cpu_flash needs equal head sizes, got {q_tHD.shape[-1]} and {v_tKD.shape[-1]}"
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if block.shape == "anticausal":
            out, lse = self.forward(q_nHD.flip(0), k_mKD.flip(0), v_mKD.flip(0), _causal(block), scale)
            return out.flip(0), lse.flip(0)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_batched((q_nHD, k_mKD, v_mKD)),
            0.0,
            block.shape == "causal",
            attn_mask=_additive_mask(block, q_nHD),
            scale=scale,
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        if block.shape == "anticausal":
            flipped = tuple(t.flip(0) for t in saved)
            dq, dk, dv = self.backward(flipped, grad_nHD.flip(0), _causal(block), scale)
            return dq.flip(0), dk.flip(0), dv.flip(0)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_batched((grad_nHD, *saved)),
            0.0,
            block.shape == "causal",
            attn_mask=_additive_mask(block, saved[0]),
            scale=scale,
        )
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


class CudaFlash:
    """torch's CUDA flash attention (fp16, bf16). Narrow bands, a few rows each, go to `Reference` in float32."""

    name = "cuda_flash"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor) -> str | None:
        """Refuse other devices and dtypes, and unequal head sizes."""
        if q_tHD.device.type != "cuda":
            return f"cuda_flash runs on cuda tensors, got {q_tHD.device.type}"
        if q_tHD.dtype not in (torch.float16, torch.bfloat16):
            return f"cuda_flash takes float16 and bfloat16, got {q_tHD.dtype}; use kernel='reference'"
        if q_tHD.shape[-1] != v_tKD.shape[-1]:
            return f"cuda_flash needs equal head sizes, got {q_tHD.shape[-1]} and {v_tKD.shape[-1]}"
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if block.shape == "band":
            return Reference().forward(q_nHD, k_mKD, v_mKD, block, scale)
        if block.shape == "anticausal":
            out, lse = self.forward(q_nHD.flip(0), k_mKD.flip(0), v_mKD.flip(0), _causal(block), scale)
            return out.flip(0), lse.flip(0)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_nHD[None], k_mKD[None], v_mKD[None], None, None, len(q_nHD), len(k_mKD),
            0.0, block.shape == "causal", False, scale=scale,
        )  # fmt: skip
        return out[0], lse[0].transpose(0, 1)

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        if block.shape == "band":
            return Reference().backward(saved, grad_nHD, block, scale)
        if block.shape == "anticausal":
            flipped = tuple(t.flip(0) for t in saved)
            dq, dk, dv = self.backward(flipped, grad_nHD.flip(0), _causal(block), scale)
            return dq.flip(0), dk.flip(0), dv.flip(0)
        q, k, v, out, lse_nH = saved
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_nHD[None].contiguous(), q[None], k[None], v[None], out[None].contiguous(),
            lse_nH.transpose(0, 1)[None].contiguous(), None, None, len(q), len(k),
            0.0, block.shape == "causal", no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return dq[0], dk[0], dv[0]


class Reference:
    """Explicit softmax over the block's scores, any device, dtype and head sizes; float64 stays float64."""

    name = "reference"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor) -> str | None:
        """Take everything."""
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        scores_KGnm = self._scores(q_nHD, k_mKD, block, scale)
        lse_KGn = scores_KGnm.logsumexp(-1)
        weights_KGnm = (scores_KGnm - lse_KGn[..., None]).exp()
        out_nKGD = torch.einsum("kgnm,mkd->nkgd", weights_KGnm, v_mKD.to(weights_KGnm.dtype))
        return out_nKGD.flatten(1, 2).to(q_nHD.dtype), lse_KGn.flatten(0, 1).transpose(0, 1)

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the formulas of arXiv 2205.14135, appendix B.2."""
        q_nHD, k_mKD, v_mKD, out_nHD, lse_nH = saved
        groups, wide = (v_mKD.shape[1], -1), lse_nH.dtype
        lse_KGn = lse_nH.transpose(0, 1).unflatten(0, groups)
        weights_KGnm = (self._scores(q_nHD, k_mKD, block, scale) - lse_KGn[..., None]).exp()
        grad_nKGD = grad_nHD.to(wide).unflatten(1, groups)
        delta_KGn = (grad_nKGD * out_nHD.to(wide).unflatten(1, groups)).sum(-1).permute(1, 2, 0)
        dv_mKD = torch.einsum("kgnm,nkgd->mkd", weights_KGnm, grad_nKGD)
        dweights_KGnm = torch.einsum("nkgd,mkd->kgnm", grad_nKGD, v_mKD.to(wide))
        dscores_KGnm = weights_KGnm * (dweights_KGnm - delta_KGn[..., None]) * scale
        dq_nKGD = torch.einsum("kgnm,mkd->nkgd", dscores_KGnm, k_mKD.to(wide))
        dk_mKD = torch.einsum("kgnm,nkgd->mkd", dscores_KGnm, q_nHD.to(wide).unflatten(1, groups))
        return dq_nKGD.flatten(1, 2), dk_mKD, dv_mKD

    def _scores(self, q_nHD: Tensor, k_mKD: Tensor, block: Block, scale: float) -> Tensor:
        """Masked scores [K, G, n, m], G query heads for each key head."""
        wide = torch.promote_types(q_nHD.dtype, torch.float32)
        q_nKGD = q_nHD.to(wide).unflatten(1, (k_mKD.shape[1], -1))
        scores_KGnm = torch.einsum("nkgd,mkd->kgnm", q_nKGD, k_mKD.to(wide)) * scale
        return scores_KGnm.masked_fill(~_visible(block, q_nHD.device), float("-inf"))


def _visible(block: Block, device: torch.device) -> Tensor:
    """Boolean mask [n, m] of the block's pairs."""
    i_n1 = torch.arange(block.q_stop - block.q_start, device=device)[:, None]
    j_1m = torch.arange(block.k_stop - block.k_start, device=device)[None, :]
    if block.shape == "causal":
        return j_1m <= i_n1
    if block.shape == "anticausal":
        return j_1m >= i_n1
    if block.shape == "band":
        return (i_n1 - j_1m >= block.lowest) & (i_n1 - j_1m <= block.highest)
    return torch.ones(len(i_n1), j_1m.shape[1], dtype=torch.bool, device=device)


def _additive_mask(block: Block, like: Tensor) -> Tensor | None:
    """0 for pairs and -inf elsewhere [n, m]; only narrow bands need one."""
    if block.shape != "band":
        return None
    visible = _visible(block, like.device)
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(
        ~visible, float("-inf")
    )


def _batched(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """[n, H, ...] to [1, H, n, ...] views."""
    return tuple(t.transpose(0, 1)[None] for t in tensors)


def _causal(block: Block) -> Block:
    """An anticausal square with the order of its rows reversed."""
    return block._replace(shape="causal")


_KERNELS: dict[str, Kernel] = {"cpu_flash": CpuFlash(), "cuda_flash": CudaFlash(), "reference": Reference()}


def choose_kernel(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """The kernel that a run file names; "auto" is the fused kernel of the device.

    Raises:
        UnsupportedError: an unknown name, or a kernel that cannot run on this device and dtype.
    """
    if name == "auto":
        half = dtype in (torch.float16, torch.bfloat16)
        name = "cpu_flash" if device == "cpu" else "cuda_flash" if half else "reference"
    if name not in _KERNELS:
        raise UnsupportedError(f"unknown kernel {name!r}; use auto, {', '.join(_KERNELS)}")
    probe = torch.empty(0, 1, 1, dtype=dtype, device=device)
    reason = _KERNELS[name].refusal(probe, probe)
    if reason:
        raise UnsupportedError(reason)
    return _KERNELS[name]
