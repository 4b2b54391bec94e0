"""From what all ranks left behind to the one error that came first, in one line."""

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from longspan import errors
from longspan.errors import CheckpointError, LongspanError, NonFiniteError, RankError
from longspan.train.failure.records import Failure
from longspan.train.failure.watch import WAS_COMPUTING

__all__ = ["Remains", "first_error"]


@dataclass(frozen=True)
class Remains:
    """What is known of a world that failed.

    Attributes:
        failures: what ranks said of themselves.
        deaths: why the processes of ranks ended that said nothing, in the order of their ends.
        silent: what is known of ranks whose processes went on and said nothing.
        step: the step a rank was in.
        traces: what native code printed in ranks that died.
    """

    failures: Mapping[int, Failure]
    deaths: Mapping[int, str] = field(default_factory=dict)
    silent: Mapping[int, str] = field(default_factory=dict)
    step: Callable[[int], int | None] = lambda rank: None
    traces: Mapping[int, str] = field(default_factory=dict)


def first_error(remains: Remains) -> LongspanError:
    """The failure that came first; those that only followed from another rank's come last.

    In this order: ranks that raised, by the clock; ranks that died without a word; ranks that stood still; ranks that
    others waited for and that said nothing; ranks that waited for each other.
    """
    by_time = sorted(remains.failures.values(), key=lambda failure: failure.time_ns)
    for failure in by_time:
        if failure.kind == "error":
            return _raised(failure)
    for rank, cause in remains.deaths.items():
        return _noted(f"rank {rank} died{_in(remains.step(rank))}: {cause}", remains.traces.get(rank, ""))
    for failure in by_time:
        if failure.kind == "hang":
            line = f"rank {failure.rank} hung{_in(failure.step)}: {failure.message}, at {failure.place}"
            return _noted(line, failure.trace)
    waited = [failure for failure in by_time if failure.kind == "timeout"]
    for rank, state in remains.silent.items():
        waiting = f"; rank {waited[0].rank} waited for it at {waited[0].place}" if waited else ""
        return RankError(f"rank {rank} stopped answering{_in(remains.step(rank))}: {state}{waiting}")
    if waited:
        places = "; ".join(_waits(remains.failures[rank]) for rank in sorted(remains.failures))
        return RankError(f"no rank failed, but the ranks wait for each other: {places}")
    if by_time:
        first = by_time[0]
        return RankError(
            f"rank {first.rank} lost its connection to another rank{_in(first.step)}, and no other rank left a record "
            f"of a failure here: {first.message}"
        )
    return RankError("a rank ended before it could say why")


def _raised(failure: Failure) -> LongspanError:
    kind = getattr(errors, failure.type, None)
    if kind is not None:
        # Before the first step all ranks read the same input; these two kinds name ranks and step themselves.
        everywhere = failure.step is None or issubclass(kind, NonFiniteError | CheckpointError)
        return kind(
            failure.message if everywhere else f"rank {failure.rank}{_comma(failure)}: {failure.message}"
        )
    line = f"rank {failure.rank} failed first{_comma(failure)}: {failure.type}: {failure.message}"
    ours = not issubclass(getattr(builtins, failure.type, Exception), OSError)
    return _noted(line, failure.trace if ours else "")


def _waits(failure: Failure) -> str:
    doing = " was computing" if failure.message == WAS_COMPUTING else ""
    return f"rank {failure.rank}{_in(failure.step)}{doing} at {failure.place}"


def _in(step: int | None) -> str:
    return "" if step is None else f" in step {step}"


def _comma(failure: Failure) -> str:
    return _in(failure.step).replace(" ", ", ", 1)


def _noted(line: str, note: str) -> RankError:
    error = RankError(line)
    if note:
        error.add_note(note)
    return error
