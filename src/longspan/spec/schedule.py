"""The order of work on each pipeline stage: one forward, one backward (1F1B).

The schedule of PipeDream-Flush (Narayanan et al., arXiv 2006.09503). With one stage it is gradient
accumulation. Stages cut into chunks (vpp > 1) are refused.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from longspan.errors import ConfigError, UnsupportedError


class Work(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage."""

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Schedule:
    """What each stage does, in order, for one optimizer step.

    Raises:
        ConfigError: a size below one.
        UnsupportedError: more than one chunk on a stage.
    """

    num_microbatches: int
    pp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        """Refuse what has no order here."""
        for name in ("num_microbatches", "pp", "vpp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vpp > 1:
            raise UnsupportedError(
                f"vpp={self.vpp}: interleaved pipeline stages are not supported; use vpp=1"
            )

    def work(self, stage: int) -> tuple[Work, ...]:
        """The passes of one stage, first to last."""
        ahead = self.in_flight(stage) - 1
        forwards = [Work("forward", microbatch, 0) for microbatch in range(self.num_microbatches)]
        backwards = [Work("backward", microbatch, 0) for microbatch in range(self.num_microbatches)]
        paired = zip(forwards[ahead:], backwards, strict=False)
        return (
            *forwards[:ahead],
            *(work for pair in paired for work in pair),
            *backwards[len(forwards) - ahead :],
        )

    def in_flight(self, stage: int) -> int:
        """Most micro-batches whose activations the stage holds at once."""
        if not 0 <= stage < self.pp:
            raise ConfigError(f"stage {stage} is not one of {self.pp}; stages are 0 to {self.pp - 1}")
        return min(self.pp - stage, self.num_microbatches)

    @property
    def bubble(self) -> float:
        """Share of the step that a stage idles when all stages take equally long."""
        return (self.pp - 1) / (self.num_microbatches + self.pp - 1)
