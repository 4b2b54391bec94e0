"""Starting the ranks of a world on this machine, waiting for them, and ending them all when one fails.

torch's elastic launcher could start them. It reports one failed rank with a clock of whole seconds, grants the others
30 seconds that cannot be changed, and ends ranks on SIGTERM instead of letting them save; so this is done here. Under
torchrun, which is for several machines, its agent does all of it.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from longspan.cli.first_error import Remains, first_error
from longspan.cli.rank import Job, Place, work
from longspan.spec.run import RunConfig
from longspan.train.failure.records import FailureFolder, process_state
from longspan.train.failure.stopping import SAME_SIGNAL_S, STOPPED_AT_ONCE

__all__ = ["launch"]

PRELOAD = [
    "longspan.cli.launch",
    "longspan.verify",
    "longspan.train.loop",
    "torch.distributed.tensor.parallel",
]

# After a first failure the other ranks end by themselves within this time; what is left then is killed.
GRACE_S = 5.0
# Stopped processes cannot end by themselves.
STOPPED_GRACE_S = 1.5
STOPPED = ("T", "t")
POLL_S = 0.2
FAILED = 2


def launch(job: Job, config: RunConfig, *arguments: Any) -> Any:
    """What `job` returns on rank 0, after all ranks have ended.

    SIGTERM is passed on to the ranks, which may then take the time they need; a second one kills them.

    Args:
        job: run by every rank.
        config: its layout says how many.
        *arguments: passed on, pickled.

    Raises:
        LongspanError: the first failure of any rank.
        SystemExit: 143, when SIGTERM ended the ranks before they could save.
    """
    world = config.layout.world
    with tempfile.TemporaryDirectory(prefix="longspan-") as name:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = FailureFolder(Path(name), world)
        started = _Started.start(folder, store.port, (job, config, *arguments))
        try:
            with started.passing_on_sigterm():
                ended = started.wait()
        finally:
            started.kill()
        if not any(started.exit_codes):
            _repeat(folder.path)
            return ended.result
        if started.terminated_at and {-signal.SIGTERM, STOPPED_AT_ONCE} & set(started.exit_codes):
            raise SystemExit(STOPPED_AT_ONCE)
        raise first_error(_remains(folder, started, ended))


@dataclass
class _Ended:
    """What the launcher saw of the ranks' ends.

    Attributes:
        result: of rank 0.
        order: ranks in the order in which their processes ended.
        left: state letters of the processes that had to be killed.
    """

    result: Any = None
    order: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)


@dataclass
class _Started:
    """The processes of a world, by rank, and the pipe on which rank 0's result comes."""

    processes: list[BaseProcess]
    reply: Connection
    terminated_at: float = 0.0

    @classmethod
    def start(cls, folder: FailureFolder, port: int, task: tuple[Any, ...]) -> "_Started":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        _start_forkserver()
        reply, sends = context.Pipe(duplex=False)
        started = cls([], reply)
        try:
            for rank in range(folder.world):
                place = Place(rank, folder.world, rank, folder.world, folder, port)
                answer = sends if rank == 0 else None
                process = context.Process(target=_serve, args=(place, answer, *task), name=f"rank{rank}")
                process.start()
                started.processes.append(process)
        except BaseException:
            started.kill()
            raise
        # From now on only rank 0 holds the end that sends, so the pipe closes with it.
        sends.close()
        return started

    @property
    def exit_codes(self) -> list[int]:
        """Exit codes by rank, negative for signals."""
        return [process.exitcode or 0 for process in self.processes]

    def wait(self) -> _Ended:
        """Until all ranks have ended: by themselves, or killed some seconds after a first failure."""
        ended, sources, failed_at = _Ended(), self._sources(), 0.0
        while len(ended.order) < len(self.processes):
            for ready in wait(list(sources), POLL_S):
                rank = sources.pop(ready)
                if rank is None:
                    with suppress(EOFError):
                        ended.result = self.reply.recv()
                    continue
                self.processes[rank].join()
                ended.order.append(rank)
                if self.processes[rank].exitcode:
                    failed_at = failed_at or time.monotonic()
            if failed_at:
                left = self._states(ended.order)
                stopped = all(state in STOPPED for state in left.values())
                if time.monotonic() - failed_at > (STOPPED_GRACE_S if stopped else GRACE_S):
                    ended.left = left
                    return ended
        return ended

    def _states(self, ended: list[int]) -> dict[int, str]:
        """State letters of the processes that still are."""
        return {
            rank: process_state(process.pid or 0)
            for rank, process in enumerate(self.processes)
            if rank not in ended
        }

    def _sources(self) -> dict[Any, int | None]:
        sentinels: dict[Any, int | None] = {p.sentinel: rank for rank, p in enumerate(self.processes)}
        return sentinels | {self.reply: None}

    def kill(self) -> None:
        """End what is left, stopped processes too."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    @contextmanager
    def passing_on_sigterm(self) -> Generator[None]:
        """Send SIGTERM on to all ranks inside the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def pass_on(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self.terminated_at and now - self.terminated_at > SAME_SIGNAL_S:
                self.kill()
                raise SystemExit(STOPPED_AT_ONCE)
            self.terminated_at = self.terminated_at or now
            for process in self.processes:
                if process.pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _start_forkserver() -> None:
    """Start the process that ranks are forked from, deaf to SIGTERM: sent to a whole process group it would die of it.

    With it the exit codes of the ranks would be lost.
    """
    # This one takes care of itself, and of the mask as well, so it comes first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _serve(place: Place, reply: Connection | None, job: Job, config: RunConfig, *arguments: Any) -> None:
    """The process of a rank."""
    # Ctrl-C reaches the whole terminal; the launcher is the one to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _divert_native_output(_native_output(place.failures.path, place.rank))
    try:
        result = work(place, lambda: None, job, config, *arguments)
        if reply is not None:
            reply.send(result)
    except Exception:
        # It is on record. Leaving the ordinary way could wait for threads, and the others wait for this end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)


def _native_output(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stderr"


def _divert_native_output(path: Path) -> None:
    """Send what native code writes to stderr into a file, so that an abort's last words can be told in one line."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    faulthandler.enable(file)


def _repeat(folder: Path) -> None:
    """Pass on what native code wrote in a run that ended well, such as warnings of libraries."""
    for path in sorted(folder.glob("rank*.stderr")):
        sys.stderr.write(path.read_text(errors="replace"))


def _remains(folder: FailureFolder, started: _Started, ended: _Ended) -> Remains:
    failures, deaths, traces = folder.read(), {}, {}
    for rank in ended.order:
        code = started.exit_codes[rank]
        if code and rank not in failures:
            words, _, trace = _native_words(_native_output(folder.path, rank)).partition("Fatal Python error")
            cause = (
                f"killed by {signal.Signals(-code).name}" if code < 0 else f"it left with exit code {code}"
            )
            deaths[rank] = " ".join(f"{cause}: {words}".split()) if words else cause
            traces[rank] = f"Fatal Python error{trace}".rstrip() if trace else ""
    silent = {
        rank: "its process was stopped (state T)"
        if state in STOPPED
        else f"its process went on (state {state}), but Python did not run in it"
        for rank, state in ended.left.items()
        if rank not in failures
    }
    return Remains(failures, deaths, silent, folder.step, traces)


def _native_words(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
