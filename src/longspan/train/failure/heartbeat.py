"""How far a rank's work has come, for those who watch over it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longspan.attention import Meter

__all__ = ["Heartbeat"]


@dataclass
class Heartbeat:
    """Written by a rank's work, read by its watch.

    Attributes:
        step: step that the work is in, from 1; None before the first.
        count: beats so far; a hang is only looked for after the first.
        meter: what its counters say counts as beats as well.
        on_step: called with every new step.
    """

    step: int | None = None
    count: int = 0
    meter: Meter | None = None
    on_step: Callable[[int], None] = lambda step: None

    def beat(self, step: int | None = None) -> None:
        """Say that the work moves, perhaps into another step."""
        self.count += 1
        if step is not None:
            self.step = step
            self.on_step(step)

    def reading(self) -> tuple[Any, ...]:
        """A value that changes as the work moves."""
        meter = self.meter
        return (self.step, self.count, *((meter.pairs, meter.rounds, meter.wait_s) if meter else ()))
