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
    """Sum of token losses and number of targets for each position bucket, float64, shape (2, buckets)."""

    table: Tensor

    @classmethod
    def zero(cls) -> "LossSums":
        """Nothing counted yet."""
        return cls(torch.zeros(2, NUM_BUCKETS, dtype=torch.float64))

    def plus(self, nll_t: Tensor, local: LocalBatch) -> "LossSums":
        """These sums with one rank's tokens of one micro-batch added.

        Args:
            nll_t: token losses, shape (t,).
            local: the same tokens.
        """
        target_t = local.labels_t != IGNORE
        buckets_n = position_buckets(local.positions_t)[target_t]
        weighted_n = (nll_t.cpu().double() * local.weights_t.double())[target_t]
        parts = torch.stack([weighted_n, torch.ones_like(weighted_n)])
        return LossSums(self.table.index_add(1, buckets_n, parts))

    def over_ranks(self, groups: Groups) -> "LossSums":
        """The sums over all ranks that hold other tokens: one reduction of numerators and denominators."""
        return LossSums(groups.add_over_dp_cp(self.table.to(groups.device, copy=True)).cpu())

    @property
    def targets(self) -> int:
        """Number of targets counted."""
        return int(self.table[1].sum())

    @property
    def mean(self) -> float:
        """Mean loss in nats; NaN when nothing was counted."""
        total, count = self.table.sum(1).tolist()
        return total / count if count else float("nan")

    @property
    def by_position(self) -> dict[str, float]:
        """Mean loss of every position bucket that has targets, by its name."""
        means = (self.table[0] / self.table[1]).tolist()
        counts = self.table[1].tolist()
        return {name: mean for name, mean, count in zip(bucket_names(), means, counts, strict=True) if count}
