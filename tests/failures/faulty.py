"""The command line with faults in it: `python -m tests.failures.faulty FAULTS longspan's words`.

FAULTS is a JSON list of objects with `what`, `rank` and `step`. Every process of the run imports this module, so the
faults are in the ranks too; the product knows nothing of them. A fault leaves the time at which it happened in a file
`fault` beside the run file.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan.cli import main
from longspan.train import loop


def raises(model: Any) -> None:
    raise ValueError("a fault for a test")


def sleeps(model: Any) -> None:
    time.sleep(1000)


def spins(model: Any) -> None:
    """Busy outside of any collective, and deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def is_killed(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits(model: Any) -> None:
    os._exit(7)


def is_stopped(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sums_too_much(model: Any) -> None:
    """A sum of another size than the other ranks': gloo aborts a process."""
    dist.all_reduce(torch.ones(100_000), group=model.groups.dp_cp)


def goes_astray(model: Any) -> None:
    """A collective that nobody else enters, so that all wait for each other."""
    dist.barrier()


def is_asked_to_stop(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


FAULTS: dict[str, Callable[[Any], None]] = {
    fault.__name__: fault
    for fault in (
        raises, sleeps, spins, is_killed, exits, is_stopped, sums_too_much, goes_astray, is_asked_to_stop
    )
}  # fmt: skip


def install(faults: list[dict[str, Any]], run: Path) -> None:
    """Let the faults happen in the middle of steps."""
    real = loop.gradients_of

    def faulty(model: Any, batches: Any) -> Any:
        for fault in faults:
            if (fault["rank"], fault["step"]) == (model.groups.rank, batches.step + 1):
                (run.parent / "fault").write_text(str(time.time()))
                FAULTS[fault["what"]](model)
        return real(model, batches)

    loop.gradients_of = faulty


if Path(sys.argv[0]).name == "faulty.py":
    install(json.loads(sys.argv[1]), Path(sys.argv[3]))

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
