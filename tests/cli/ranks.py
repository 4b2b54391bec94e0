"""The ranks of one run as processes of their own, which a test may kill at any moment."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 240


@contextmanager
def started(
    *words: str | Path, ranks: int, slow_saves_s: float = 0.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """One `longspan` command on several ranks, started as torchrun would; none of them outlives the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cli.slow_saves", str(slow_saves_s), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            | {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each rank printed on stderr once all have ended."""
    return [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]


def wait_until(condition: Callable[[], bool], processes: list[subprocess.Popen[str]]) -> bool:
    """Whether the condition came true while all processes were running."""
    while not condition():
        for process in processes:
            try:
                process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            return condition()
    return True
