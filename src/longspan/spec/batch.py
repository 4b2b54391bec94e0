"""How the rows of one optimizer step are cut into micro-batches and dealt to data-parallel ranks."""

from dataclasses import dataclass

from longspan.errors import ConfigError
from longspan.spec.layout import any_of


@dataclass(frozen=True)
class BatchPlan:
    """Rows of one step, dealt out evenly.

    Args:
        global_batch: rows that one optimizer step consumes, over all ranks and micro-batches.
        micro_batch: rows that one data-parallel rank runs through the model at once.
        dp: data-parallel ranks.

    Raises:
        ConfigError: rows that cannot be dealt evenly; the message names the nearest that can.
    """

    global_batch: int
    micro_batch: int
    dp: int

    def __post_init__(self) -> None:
        """Refuse a batch that leaves ranks with different numbers of micro-batches."""
        for name in ("global_batch", "micro_batch", "dp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.global_batch % self.rows_at_once:
            below = self.global_batch // self.rows_at_once * self.rows_at_once
            nearest = any_of([rows for rows in (below, below + self.rows_at_once) if rows])
            raise ConfigError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch={self.micro_batch} × "
                f"dp={self.dp}; use global_batch={nearest}"
            )

    @property
    def rows_at_once(self) -> int:
        """Rows that all ranks together run in one micro-batch."""
        return self.micro_batch * self.dp

    @property
    def num_microbatches(self) -> int:
        """Micro-batches whose gradients one optimizer step accumulates."""
        return self.global_batch // self.rows_at_once

    def samples(self, step: int, microbatch: int, dp_coord: int) -> range:
        """Global sample indices of the rows that one dp rank runs in one micro-batch.

        Step s consumes samples s·global_batch to (s+1)·global_batch - 1 whatever the layout, so that the
        layout never changes which rows a step sees.
        """
        turn = microbatch * self.dp + dp_coord
        start = step * self.global_batch + turn * self.micro_batch
        return range(start, start + self.micro_batch)
