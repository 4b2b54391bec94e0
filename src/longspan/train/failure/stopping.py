"""SIGTERM as a wish: finish the step, save, and leave in order."""

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from longspan.train.groups import Groups

__all__ = ["SAME_SIGNAL_S", "STOPPED_AT_ONCE", "Stop", "on_any_rank"]

STOPPED_AT_ONCE = 128 + signal.SIGTERM
"""Exit code of a process that a second SIGTERM ended, as a shell would count it."""

SAME_SIGNAL_S = 1.0
"""A SIGTERM that follows within this time is the same one: sent to the whole group, and passed on by the launcher."""


@dataclass
class Stop:
    """Whether this process was asked to stop.

    Attributes:
        requested: SIGTERM has arrived here; perhaps on no other rank, so ranks must agree before they act on it.
    """

    requested: bool = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Take SIGTERM as a request inside the block; a second one ends the process at once.

        Outside the main thread, where Python cannot take signals, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        first_at = 0.0

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal first_at
            now = time.monotonic()
            if self.requested and now - first_at > SAME_SIGNAL_S:
                os._exit(STOPPED_AT_ONCE)
            if not self.requested:
                self.requested, first_at = True, now

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def on_any_rank(groups: Groups, *flags: bool) -> list[bool]:
    """Each flag, true if it is true on any rank of the world; every rank calls it together."""
    if groups.layout.world == 1:
        return [*flags]
    tensor = torch.tensor(flags, dtype=torch.uint8, device=groups.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]
