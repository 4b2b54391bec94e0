"""Staged runs: row length and batch of every step, and one clock in tokens that runs through all stages.

Training documents are one endless stream of tokens. At a row length s, row i is tokens [i·s, (i + 1)·s) of it. A
stage begins with the first row of its own length that starts at or after the last token of the stage before it. So no
token is consumed twice, fewer than one row is passed over at each change, and where a step reads follows from its
number alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from longspan.errors import ConfigError
from longspan.spec.batch import BatchPlan

__all__ = ["Stage", "StagePlan"]


@dataclass(frozen=True)
class Stage:
    """Optimizer steps with rows of one length.

    Attributes:
        number: place in the run, from 1.
        sequence: tokens of a row.
        steps: optimizer steps.
        batch: how the rows of a step are dealt out.
        first_step: number of the stage's first step in the whole run, from 0.
        first_row: number of its first row, counted in rows of its own length.
        seen_tokens: tokens that the stages before it consume.
    """

    number: int
    sequence: int
    steps: int
    batch: BatchPlan
    first_step: int = 0
    first_row: int = 0
    seen_tokens: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes, over all ranks."""
        return self.batch.global_batch * self.sequence

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one micro-batch, over the ranks that share it."""
        return self.batch.micro_batch * self.sequence

    @property
    def end_step(self) -> int:
        """Number of the first step after the stage."""
        return self.first_step + self.steps

    def inside(self, step: int) -> int:
        """How many steps of this stage come before a step of the run."""
        return step - self.first_step

    def rows(self, step: int) -> range:
        """Rows of the stage's own length that a step of the run consumes."""
        start = self.first_row + self.inside(step) * self.batch.global_batch
        return range(start, start + self.batch.global_batch)

    def next(self, sequence: int, steps: int, batch: BatchPlan) -> "Stage":
        """The stage that follows this one."""
        end_token = self.rows(self.end_step).start * self.sequence
        return Stage(
            number=self.number + 1,
            sequence=sequence,
            steps=steps,
            batch=batch,
            first_step=self.end_step,
            first_row=-(-end_token // sequence),
            seen_tokens=self.seen_tokens + self.steps * self.tokens_per_step,
        )


@dataclass(frozen=True)
class StagePlan:
    """The stages of a run, at least one, in order; made by `of`."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, sizes: Iterable[tuple[int, int, BatchPlan]]) -> Self:
        """The plan of stages given by (tokens of a row, steps, batch) each.

        Raises:
            ConfigError: no stage, or one without tokens or steps.
        """
        stages: list[Stage] = []
        for sequence, steps, batch in sizes:
            if min(sequence, steps) < 1:
                raise ConfigError(
                    f"a stage of {steps} steps with rows of {sequence} tokens; give 1 or more of each"
                )
            stages.append(
                stages[-1].next(sequence, steps, batch) if stages else Stage(1, sequence, steps, batch)
            )
        if not stages:
            raise ConfigError("a run needs a stage; give one")
        return cls(tuple(stages))

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.stages[-1].end_step

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens_before(self.steps)

    @property
    def longest(self) -> Stage:
        """The first of the stages with the longest rows."""
        return max(self.stages, key=lambda stage: stage.sequence)

    def stage_of(self, step: int) -> Stage:
        """The stage of a step, from 0; the last one also after its end."""
        return next((stage for stage in self.stages if step < stage.end_step), self.stages[-1])

    def tokens_before(self, step: int) -> int:
        """Tokens consumed before a step begins: the clock of the learning rate."""
        stage = self.stage_of(step)
        return stage.seen_tokens + stage.inside(step) * stage.tokens_per_step
