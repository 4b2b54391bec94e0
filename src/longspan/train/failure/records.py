"""What ranks tell each other when something goes wrong: one small file for each, in a folder that all of them see.

The files say which rank failed first to the nanosecond; exit codes and torch's own reports, whose clock has whole
seconds, do not. They also reach ranks that are not communicating, which a closed connection does not.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

from torch.distributed import DistError, DistNetworkError, DistStoreError

import longspan

__all__ = ["Failure", "FailureFolder", "Kind", "failure_of", "frame_place", "process_state", "trace_place"]

Kind = Literal["error", "hang", "timeout", "waiting", "lost"]
"""error: it raised. hang: it stood still. The rest are echoes of another rank's trouble: it waited for others in
vain until its time was up (timeout), was still waiting then (waiting), or lost its connection to them (lost)."""

# What communication says when the other side is the one in trouble; gloo and NCCL raise plain RuntimeErrors.
_TIMEOUTS = ("timed out", "timeout")
_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote process exited",
)
_LONGSPAN = str(Path(longspan.__file__).parent.parent) + os.sep
_COUNTING = os.path.join("train", "waiting.py")
_STDLIB = os.path.dirname(os.__file__)
_COMMUNICATION = ("gloo", "nccl", "tcpstore", *_LOST)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: global rank.
        time_ns: when, in nanoseconds since 1970.
        step: step that it was in, from 1; None before the first.
        kind: whether it failed by itself, or only saw another rank fail.
        type: name of the exception's class; empty for a hang.
        message: what the exception said, in one line.
        place: "file:line in function" of the innermost code that is not a library's; files of ours from longspan/ on.
        trace: the whole traceback or stack.
    """

    rank: int
    time_ns: int
    step: int | None
    kind: Kind
    type: str
    message: str
    place: str
    trace: str

    @property
    def is_echo(self) -> bool:
        """Whether another rank must have failed before."""
        return self.kind not in ("error", "hang")


def failure_of(error: BaseException, rank: int, step: int | None) -> Failure:
    """The record of an exception that just ended a rank's work."""
    return Failure(
        rank=rank,
        time_ns=time.time_ns(),
        step=step,
        kind=_kind(error),
        type=type(error).__name__,
        message=" ".join(str(error).split()),
        place=trace_place(error.__traceback__),
        trace="".join(traceback.format_exception(error)).rstrip(),
    )


def _kind(error: BaseException | None) -> Kind:
    """An error that was raised because communication broke down is an echo as well."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and _has(words, _COMMUNICATION)):
            if _has(words, _LOST):
                return "lost"
            if _has(words, _TIMEOUTS):
                return "timeout"
            if isinstance(error, DistNetworkError | DistStoreError):
                return "lost"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "error"


def _has(words: str, parts: tuple[str, ...]) -> bool:
    return any(part in words for part in parts)


def trace_place(trace: TracebackType | None) -> str:
    """Where an exception was raised: its innermost frame that is no library's."""
    return _place(traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False))


def frame_place(frame: FrameType) -> str:
    """Where a thread is: its innermost frame that is no library's."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return _place(frames[::-1])


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last frame that is no library's; no source file is read for it."""
    if not frames:
        return ""
    own = [frame for frame in frames if not _is_library(frame.filename)]
    last = (own or frames)[-1]
    return f"{last.filename.removeprefix(_LONGSPAN)}:{last.lineno} in {last.name}"


def _is_library(file: str) -> bool:
    # Longspan itself may be installed among the libraries; what only counts waiting tells nothing.
    if file.startswith(_LONGSPAN):
        return file.endswith(_COUNTING)
    return _has(file, (_STDLIB, "site-packages", "<frozen"))


@dataclass(frozen=True)
class FailureFolder:
    """The files of one world: who runs where, the step each rank is in, and who failed how.

    Args:
        path: the folder, which this makes when the first rank joins.
        world: number of ranks; files of others are left over from another run.
    """

    path: Path
    world: int

    def join(self, rank: int) -> None:
        """Say that this process is a rank, and forget how this rank failed in an earlier run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (f"rank{rank}.json", f"rank{rank}.step"):
            (self.path / name).unlink(missing_ok=True)
        member = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}
        self._replace(f"rank{rank}.pid", json.dumps(member))

    def leave(self, rank: int) -> None:
        """Say that this rank is done, so that its end is no failure; the last one takes the folder along."""
        for name in (f"rank{rank}.pid", f"rank{rank}.step"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def note_step(self, rank: int, step: int) -> None:
        """Say which step this rank is in; a full disk is not worth failing for."""
        with suppress(OSError):
            self._replace(f"rank{rank}.step", str(step))

    def step(self, rank: int) -> int | None:
        """The step that a rank said it was in."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.path / f"rank{rank}.step").read_text())
        return None

    def write(self, failure: Failure) -> bool:
        """Record how a rank failed, unless it has said so already; whether this was the first word of it.

        A folder that cannot be written, as on a full disk, must not hide the failure itself: it counts as the first.
        """
        own = self.path / f"rank{failure.rank}.json"
        draft = self.path / f"{own.name}.{time.time_ns()}"
        try:
            draft.write_text(json.dumps(asdict(failure)))
            os.link(draft, own)
            return True
        except FileExistsError:
            return False
        except OSError:
            return True
        finally:
            with suppress(OSError):
                draft.unlink()

    def read(self) -> dict[int, Failure]:
        """All records, by rank."""
        records = {}
        for rank in range(self.world):
            with suppress(FileNotFoundError):
                records[rank] = Failure(**json.loads((self.path / f"rank{rank}.json").read_text()))
        return records

    def members(self) -> dict[int, int]:
        """Process ids of the ranks on this machine that have joined and not left."""
        return {
            rank: member["pid"] for rank, member in self._joined() if member["host"] == socket.gethostname()
        }

    def dead(self) -> list[int]:
        """Ranks on this machine whose process is gone though they have neither left nor said how they failed."""
        failed = self.read()
        return [
            rank
            for rank, member in self._joined()
            if rank not in failed
            and member["host"] == socket.gethostname()
            and (
                process_state(member["pid"]) in ("gone", "Z") or _started(member["pid"]) != member["started"]
            )
            and (self.path / f"rank{rank}.pid").exists()
        ]

    def _joined(self) -> list[tuple[int, dict]]:
        joined = []
        for rank in range(self.world):
            with suppress(FileNotFoundError):
                joined.append((rank, json.loads((self.path / f"rank{rank}.pid").read_text())))
        return joined

    def _replace(self, name: str, text: str) -> None:
        draft = self.path / f"{name}.draft"
        draft.write_text(text)
        draft.replace(self.path / name)


def process_state(pid: int) -> str:
    """State letter of a process as in `ps` (T: stopped, Z: ended), "gone", or "?" where the system does not say."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "?"
    fields = _stat(pid)
    return fields[0] if fields else "?"


def _started(pid: int) -> str:
    """When a process started, to tell it from a later one with its number."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Fields of Linux's /proc/PID/stat after the name, which may itself hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
