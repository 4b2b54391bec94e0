"""What attention calls really did, counted where the collective and the kernel are called."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """A tally that one rank's attention calls add to.

    Attributes:
        sent_bytes: payload bytes handed to sends and collectives.
        rounds: times that messages were posted.
        pairs: (query, key, query head) triples computed in forward.
        wait_s: seconds the host waited for other ranks.
    """

    sent_bytes: int = 0
    rounds: int = 0
    pairs: int = 0
    wait_s: float = 0.0
    _depth: int = 0

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the seconds of the block as waiting; a block inside another counts once."""
        start = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if not self._depth:
            self.wait_s += time.perf_counter() - start
