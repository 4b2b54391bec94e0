"""Which rows each data-parallel rank sees in each step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from longspan.data.batch import PackedBatch
from longspan.data.packing import PackedRows
from longspan.errors import ConfigError
from longspan.spec.batch import BatchPlan


@dataclass(frozen=True)
class StepData:
    """One optimizer step's data, as one data-parallel rank sees it.

    Args:
        step: number of the step, from 0.
        micro_batches: this rank's micro-batches, in order.
        num_targets: targets of the *whole* step, over all ranks and micro-batches: the loss's divisor.
    """

    step: int
    micro_batches: tuple[PackedBatch, ...]
    num_targets: int


@dataclass(frozen=True)
class Batches:
    """Steps without end, from `start_step` on.

    Step s consists of the global_batch rows from first_row + s * global_batch on, which `BatchPlan.samples` deals
    to ranks and micro-batches: another layout sees the very same rows in each step. The step's number of targets
    needs no communication: every rank works out the pieces of all rows of the step, which reads no token.

    Args:
        rows: packed rows.
        plan: global batch, micro-batch and data-parallel degree.
        dp_rank: this rank's place on the data-parallel axis.
        start_step: first step that iterating gives.
        first_row: first row of step 0.

    Raises:
        ConfigError: a rank that is not on the axis.
    """

    rows: PackedRows
    plan: BatchPlan
    dp_rank: int = 0
    start_step: int = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        """Refuse a rank whose rows would be another step's."""
        if not 0 <= self.dp_rank < self.plan.dp:
            raise ConfigError(
                f"dp_rank={self.dp_rank} is not on an axis of dp={self.plan.dp}; use one below it"
            )

    def __iter__(self) -> Iterator[StepData]:
        """Steps from `start_step` on."""
        return map(self.step, count(self.start_step))

    def step(self, step: int) -> StepData:
        """Data of any one step."""
        plan = self.plan
        start = self.first_row + step * plan.global_batch
        rows = range(start, start + plan.global_batch)
        mine = (plan.samples(0, turn, self.dp_rank) for turn in range(plan.num_microbatches))
        return StepData(
            step=step,
            micro_batches=tuple(self.rows.batch(rows[samples.start : samples.stop]) for samples in mine),
            num_targets=self.rows.num_targets(rows),
        )
