"""What every block kernel does: exact attention of one block, with its log-sum-exp.

# n queries, m keys, H query heads, K key/value heads (H a multiple of K, never expanded in memory), D head size
"""

from typing import Protocol

import torch
from torch import Tensor

from longspan.attention.score import Score
from longspan.spec.blocks import Block


class Kernel(Protocol):
    """Forward and backward of one block; empty blocks and rows that see no key never reach a kernel."""

    name: str

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor, score: Score) -> str | None:
        """Why this kernel cannot take such tensors or scores, or None."""

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        """Output [n, H, Dv] in the input dtype and log-sum-exp [n, H] in at least float32."""

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [n, H, D], k [m, K, D] and v [m, K, Dv].

        Args:
            saved: q, k, v of the block, and output [n, H, Dv] and log-sum-exp [n, H] of the *whole* row, which make
                the block's gradients exact parts of the whole.
            grad_nHD: gradient of the whole output.
            block: the block's shape.
            score: how scores are made.
        """


def visible(block: Block, rows: slice, device: torch.device) -> Tensor:
    """Boolean mask [rows, m] of the block's pairs for some of its queries."""
    i_n1 = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j_1m = torch.arange(block.k_stop - block.k_start, device=device)[None, :]
    if block.shape == "causal":
        return j_1m <= i_n1
    if block.shape == "anticausal":
        return j_1m >= i_n1
    if block.shape == "band":
        return (i_n1 - j_1m >= block.lowest) & (i_n1 - j_1m <= block.highest)
    return torch.ones(len(i_n1), j_1m.shape[1], dtype=torch.bool, device=device)
