"""Running a faulty command line and seeing how long its end takes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import TORCHRUN, nobody_left

TIMEOUT_S = 240


@dataclass(frozen=True)
class Ended:
    """A run that is over: exit code, output, and the seconds from its fault to the end of its last process."""

    code: int
    out: str
    err: str
    seconds: float


def fault(what: str, rank: int, step: int = 3) -> dict[str, object]:
    return {"what": what, "rank": rank, "step": step}


def faulty(
    run: Path,
    *faults: dict[str, object],
    words: tuple[str, ...] = (),
    ranks: int | None = None,
    when: Callable[[], bool] | None = None,
    act: Callable[[int], None] = lambda pid: None,
) -> Ended:
    """Train with faults; without any, as a person would.

    Args:
        run: run file in a folder of its own.
        *faults: from `fault`.
        words: further words of the command line.
        ranks: processes to start under torchrun; without it, the command stands alone.
        when: once it is true, `act` is called with the process id of the command, as a person would interfere.
        act: sends a signal, say.
    """
    marker = run.parent / "fault"
    marker.unlink(missing_ok=True)
    start = (*TORCHRUN, str(ranks)) if ranks else ()
    command = ["-m", "tests.failures.faulty", json.dumps(faults), "train", str(run), *words, "--json"]
    with subprocess.Popen(
        [sys.executable, *start, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            while when is not None and process.poll() is None and not when():
                time.sleep(0.05)
            if when is not None:
                marker.write_text(str(time.time()))
                act(process.pid)
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert nobody_left(process.pid), "the run left processes behind"
    seconds = time.time() - float(marker.read_text()) if marker.exists() else 0.0
    return Ended(process.returncode, out, err, seconds)
