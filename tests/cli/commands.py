"""Running the command line as a person does, and reading what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.train.loop import CENSUS_STEPS

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def longspan(
    *words: str | Path, ranks: int | None = None, interrupt_at: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own, and no process of it outlives it.

    Args:
        *words: the command.
        ranks: processes to start under torchrun; without it, the command stands alone.
        interrupt_at: once this file holds a few steps, all processes get what Ctrl-C sends.
    """
    start = (*TORCHRUN, str(ranks)) if ranks else ()
    with subprocess.Popen(
        [sys.executable, *start, "-m", "longspan", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    ) as process:
        while interrupt_at and process.poll() is None:
            # The first steps count storages in callbacks, where Python drops an interruption.
            if interrupt_at.exists() and interrupt_at.read_text().count("\n") > CENSUS_STEPS + 1:
                os.killpg(process.pid, signal.SIGINT)
                break
            time.sleep(0.1)
        out, err = process.communicate(timeout=240)
    assert nobody_left(process.pid), f"{words} left processes behind"
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def _heed_interrupts() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and every child inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def nobody_left(session: int) -> bool:
    """Whether all processes of a session are gone; the last ones get a moment to notice."""
    for _ in range(100):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def done(*words: str | Path, ranks: int | None = None) -> Any:
    """The one JSON value on stdout of a command that succeeds and has nothing else to say."""
    finished = longspan(*words, "--json", ranks=ranks)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line of a command that cannot run, without the program's name; no rank is started for it."""
    assert main([*map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return one_line(printed.err)


def one_line(text: str) -> str:
    """What the program says in its one line."""
    assert text.count("\n") == 1, text
    assert text.startswith("longspan: ")
    return text.removeprefix("longspan: ").rstrip()
