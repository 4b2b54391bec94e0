"""Loss sums: numerators and denominators of every mean are added over ranks and micro-batches before any division."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.data import IGNORE, LocalBatch, bucket_names, position_buckets
from longspan.train.groups import Groups

__all__ = ["LossSums"]

NUM_BUCKETS = len(bucket_names())


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums of token losses and numbers of targets, float64, shape (2, 2 · buckets).

    The first half of the columns is by position, the second by document length; each holds every target once, and
    one reduction carries both.
    """

    table: Tensor

    @classmethod
    def zero(cls) -> "LossSums":
        """Nothing counted yet."""
        return cls(torch.zeros(2, 2 * NUM_BUCKETS, dtype=torch.float64))

    def plus(self, nll_t: Tensor, local: LocalBatch) -> "LossSums":
        """These sums with one rank's tokens of one micro-batch added.

        Args:
            nll_t: token losses, shape (t,).
            local: the same tokens.
        """
        target_t = local.labels_t != IGNORE
        by_position_n = position_buckets(local.positions_t)[target_t]
        by_length_n = position_buckets(local.lengths_t)[target_t] + NUM_BUCKETS
        weighted_n = (nll_t.cpu().double() * local.weights_t.double())[target_t]
        parts = torch.stack([weighted_n, torch.ones_like(weighted_n)])
        table = self.table.index_add(1, by_position_n, parts).index_add(1, by_length_n, parts)
        return LossSums(table)

    def over_ranks(self, groups: Groups) -> "LossSums":
        """The sums over all ranks that hold other tokens: one reduction of numerators and denominators."""
        return LossSums(groups.add_over_dp_cp(self.table.to(groups.device, copy=True)).cpu())

    @property
    def targets(self) -> int:
        """Number of targets counted."""
        return int(self._by_position[1].sum())

    @property
    def mean(self) -> float:
        """Mean loss in nats; NaN when nothing was counted."""
        total, count = self._by_position.sum(1).tolist()
        return total / count if count else float("nan")

    @property
    def by_position(self) -> dict[str, float]:
        """Mean loss of every bucket of positions that has targets, by its name."""
        return _means(self._by_position)

    @property
    def by_document_length(self) -> dict[str, float]:
        """The same by tokens of the document, or of the piece of it that the row holds."""
        return _means(self.table[:, NUM_BUCKETS:])

    @property
    def _by_position(self) -> Tensor:
        return self.table[:, :NUM_BUCKETS]


def _means(table: Tensor) -> dict[str, float]:
    means, counts = (table[0] / table[1]).tolist(), table[1].tolist()
    return {name: mean for name, mean, count in zip(bucket_names(), means, counts, strict=True) if count}
