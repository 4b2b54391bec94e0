"""Explicit softmax, for any device, dtype, head sizes and scores.

# n queries of a tile, m keys, K key/value heads, G query heads for each, D head size
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.attention.kernels.protocol import visible
from longspan.attention.score import Score
from longspan.spec.blocks import Block

TILE_SCORES = 2**22
"""Scores that one tile holds at most, over all heads, so that memory does not grow with the square of the block."""


class Reference:
    """Explicit softmax over the block's scores, a tile of queries at a time; float64 stays float64."""

    name = "reference"

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor, score: Score) -> str | None:
        """Take everything."""
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        wide = torch.promote_types(q_nHD.dtype, torch.float32)
        out_nHD = q_nHD.new_empty(*q_nHD.shape[:2], v_mKD.shape[-1])
        lse_nH = q_nHD.new_empty(q_nHD.shape[:2], dtype=wide)
        for rows in _tiles(q_nHD, k_mKD):
            scores_KGnm, _ = _scores(q_nHD[rows], k_mKD, visible(block, rows, q_nHD.device), score)
            lse_KGn = scores_KGnm.logsumexp(-1)
            weights_KGnm = (scores_KGnm - lse_KGn[..., None]).exp()
            out_nKGD = torch.einsum("kgnm,mkd->nkgd", weights_KGnm, v_mKD.to(wide))
            out_nHD[rows] = out_nKGD.flatten(1, 2).to(q_nHD.dtype)
            lse_nH[rows] = lse_KGn.flatten(0, 1).transpose(0, 1)
        return out_nHD, lse_nH

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the formulas of arXiv 2205.14135, appendix B.2."""
        q_nHD, k_mKD, v_mKD, out_nHD, lse_nH = saved
        groups, wide = (v_mKD.shape[1], -1), lse_nH.dtype
        dq_nHD = torch.empty_like(q_nHD, dtype=wide)
        dk_mKD, dv_mKD = (torch.zeros_like(t, dtype=wide) for t in (k_mKD, v_mKD))
        for rows in _tiles(q_nHD, k_mKD):
            scores_KGnm, slope_KGnm = _scores(q_nHD[rows], k_mKD, visible(block, rows, q_nHD.device), score)
            lse_KGn = lse_nH[rows].transpose(0, 1).unflatten(0, groups)
            weights_KGnm = (scores_KGnm - lse_KGn[..., None]).exp()
            grad_nKGD, out_nKGD = (t[rows].to(wide).unflatten(1, groups) for t in (grad_nHD, out_nHD))
            delta_KGn = (grad_nKGD * out_nKGD).sum(-1).permute(1, 2, 0)
            dv_mKD += torch.einsum("kgnm,nkgd->mkd", weights_KGnm, grad_nKGD)
            dweights_KGnm = torch.einsum("nkgd,mkd->kgnm", grad_nKGD, v_mKD.to(wide))
            dscores_KGnm = weights_KGnm * (dweights_KGnm - delta_KGn[..., None]) * slope_KGnm * score.scale
            dq_nHD[rows] = torch.einsum("kgnm,mkd->nkgd", dscores_KGnm, k_mKD.to(wide)).flatten(1, 2)
            q_nKGD = q_nHD[rows].to(wide).unflatten(1, groups)
            dk_mKD += torch.einsum("kgnm,nkgd->mkd", dscores_KGnm, q_nKGD)
        return dq_nHD, dk_mKD, dv_mKD


def _tiles(q_nHD: Tensor, k_mKD: Tensor) -> Iterator[slice]:
    height = max(1, TILE_SCORES // (q_nHD.shape[1] * len(k_mKD)))
    for top in range(0, len(q_nHD), height):
        yield slice(top, min(top + height, len(q_nHD)))


def _scores(q_nHD: Tensor, k_mKD: Tensor, visible_nm: Tensor, score: Score) -> tuple[Tensor, Tensor | float]:
    """Masked scores [K, G, n, m], and their slope over the uncapped ones."""
    wide = torch.promote_types(q_nHD.dtype, torch.float32)
    q_nKGD = q_nHD.to(wide).unflatten(1, (k_mKD.shape[1], -1))
    scores_KGnm = torch.einsum("nkgd,mkd->kgnm", q_nKGD, k_mKD.to(wide)) * score.scale
    slope_KGnm: Tensor | float = 1.0
    if score.softcap is not None:
        capped_KGnm = (scores_KGnm / score.softcap).tanh()
        scores_KGnm, slope_KGnm = score.softcap * capped_KGnm, 1 - capped_KGnm.square()
    return scores_KGnm.masked_fill(~visible_nm, float("-inf")), slope_KGnm
