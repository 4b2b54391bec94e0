"""The part of a batch that one context-parallel rank computes, as torch tensors.

Suffix legend: T tokens of the whole micro-batch, t this rank's.
"""

from dataclasses import dataclass

import numpy as np
import torch

from longspan.data.batch import PackedBatch
from longspan.errors import DataError


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """This rank's tokens; see `PackedBatch` for the meaning of each.

    Args:
        tokens_t: token ids, int64.
        positions_t: true place of each token in its piece, int64.
        labels_t: label of each token, int64, shifted before the tokens were dealt.
        weights_t: loss weight of each label, float32.
        lengths_t: tokens of the piece that each token is in, int64.
    """

    tokens_t: torch.Tensor
    positions_t: torch.Tensor
    labels_t: torch.Tensor
    weights_t: torch.Tensor
    lengths_t: torch.Tensor


def shard(batch: PackedBatch, index_t: np.ndarray) -> LocalBatch:
    """This rank's tokens of a batch, copied, on the CPU.

    Args:
        batch: the whole micro-batch.
        index_t: which tokens, in local order, int, shape (t,); may be empty.

    Raises:
        DataError: an index outside the batch.
    """
    if len(index_t) and (index_t.min() < 0 or index_t.max() >= len(batch.tokens_T)):
        span = f"{index_t.min()} to {index_t.max()}"
        raise DataError(
            f"token index {span} leaves a batch of {len(batch.tokens_T)} tokens; shard this batch"
        )
    arrays = (batch.tokens_T, batch.positions_T, batch.labels_T, batch.weights_T, batch.piece_lengths_T)
    return LocalBatch(*(torch.from_numpy(array[index_t]) for array in arrays))
