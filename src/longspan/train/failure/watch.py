"""A thread beside each rank's work that sees other ranks fail and its own work stand still, and then ends the process.

Without it a rank that is not communicating, or that ignores signals, would keep the whole run waiting, and a rank
that hangs would never be named: the others only know that they waited.

Known shortfalls: native code that keeps Python's lock stops this thread too; then the launcher has to end the rank.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from signal import SIGCONT
from types import FrameType

import torch

from longspan.train.failure.heartbeat import Heartbeat
from longspan.train.failure.records import Failure, FailureFolder, Kind, frame_place, process_state

__all__ = ["ENDED_BY_WATCH", "WAS_COMPUTING", "Watch", "is_communicating", "wake_stopped"]

ENDED_BY_WATCH = 3
"""Exit code of a rank that its watch ended, because it hung or because another rank had failed."""

WAS_COMPUTING = "was computing"
"""Message of a rank that others waited for in vain, and that moved all the while."""

POLL_S = 0.5
# A rank that another one's failure reaches through its own communication says so itself within this time, in which
# a save that is under way may end as well.
GRACE_S = 2.0

_TORCH = str(Path(torch.__file__).parent) + os.sep
_TORCH_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
_TRANSPORT = os.path.join("longspan", "attention", "transport.py")


class Watch:
    """The watch of one rank, from `start` until `stop`.

    Args:
        folder: what the ranks tell each other.
        rank: this rank.
        timeout_s: seconds after which work that does not move, and does not communicate, counts as hung.
        heartbeat: how far this rank's work has come.
        say: called before the process is ended without having spoken itself.
    """

    def __init__(
        self,
        folder: FailureFolder,
        rank: int,
        timeout_s: float,
        heartbeat: Heartbeat,
        say: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._rank, self._timeout_s, self._heartbeat = folder, rank, timeout_s, heartbeat
        self._say = say
        self._idle_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch the calling process."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch: the rank is done."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen, before = self._heartbeat.reading(), time.monotonic()
        while not self._stop.wait(POLL_S):
            now = time.monotonic()
            # A process that was suspended has not been idle meanwhile.
            self._idle_s += min(now - before, 2 * POLL_S)
            before = now
            launcher = parent_process()
            if launcher is not None and not launcher.is_alive():
                os._exit(ENDED_BY_WATCH)
            failed = self._folder.read()
            if failed or self._folder.dead():
                self._end_with(failed)
                return
            reading = self._heartbeat.reading()
            if reading != seen or is_communicating():
                self._idle_s, seen = 0.0, reading
            elif self._heartbeat.count and self._folder.world > 1 and self._idle_s > self._timeout_s:
                self._end("hang", f"no progress for {self._idle_s:.0f} s")
                return

    def _end_with(self, failed: dict[int, Failure]) -> None:
        """Give the work a moment to fail by itself, and end the process."""
        if self._rank in failed:
            # The work has spoken and is on its way out; this only guards against its standing still there.
            if not self._stop.wait(2 * GRACE_S):
                os._exit(ENDED_BY_WATCH)
            return
        if any(other.kind == "timeout" for other in failed.values()):
            self._answer_timeout(failed)
        if not self._stop.wait(GRACE_S):
            self._end("lost", "ended because another rank had failed")

    def _answer_timeout(self, failed: dict[int, Failure]) -> None:
        """Others waited in vain: say whether it was for this rank."""
        if is_communicating():
            self._folder.write(self._failure("waiting", "was waiting for others"))
        elif self._idle_s < self._timeout_s / 2:
            self._folder.write(self._failure("waiting", WAS_COMPUTING))
        elif all(other.is_echo for other in failed.values()):
            self._end("hang", f"no progress for {self._idle_s:.0f} s, while others waited")

    def _failure(self, kind: Kind, message: str) -> Failure:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return Failure(
            rank=self._rank,
            time_ns=time.time_ns(),
            step=self._heartbeat.step,
            kind=kind,
            type="",
            message=message,
            place=frame_place(frame) if frame else "",
            # Stacks are read from source files, which takes long while the work keeps Python's lock busy.
            trace=_stacks() if kind == "hang" else "",
        )

    def _end(self, kind: Kind, message: str) -> None:
        if self._folder.write(self._failure(kind, message)):
            self._say()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(ENDED_BY_WATCH)


def wake_stopped(folder: FailureFolder) -> None:
    """Let stopped ranks of this machine run on, so that they notice the end of the run and end too."""
    for pid in folder.members().values():
        if process_state(pid) in ("T", "t"):
            with suppress(OSError):
                os.kill(pid, SIGCONT)


def is_communicating() -> bool:
    """Whether the work of this process is inside communication: its time-out is then the group's business."""
    # Autograd runs backward in threads of its own on some devices; `threading` has not started them.
    started = {
        thread.ident
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.name.startswith("Dummy-")
    }
    return any(
        _is_communication(frame) for ident, frame in sys._current_frames().items() if ident not in started
    )


def _is_communication(frame: FrameType | None) -> bool:
    """Whether the innermost frame, apart from torch's general machinery, belongs to communication."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH_DISTRIBUTED) or file.endswith(_TRANSPORT):
            return True
        if not file.startswith(_TORCH):
            return False
        frame = frame.f_back
    return False


def _stacks() -> str:
    """The stacks of all threads that run Python, the main one's last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in frames
        if names.get(ident) != "watch"
    )
