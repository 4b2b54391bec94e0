"""Which of several failures came first, and how it is told."""

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from longspan.cli.first_error import Remains, first_error
from longspan.errors import CheckpointError, DataError, LongspanError, NonFiniteError, RankError
from longspan.train.failure.records import Failure, failure_of

LOST = "[/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
TIMED_OUT = "[/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv"


def failure(rank, time_ns, kind="error", type="ValueError", message="bad", step=3) -> Failure:
    return Failure(
        rank=rank, time_ns=time_ns, step=step, kind=kind, type=type, message=message, place="f.py:1 in f",
        trace=f"the stack of rank {rank}",
    )  # fmt: skip


def told(*failures, **known) -> LongspanError:
    return first_error(Remains({failure.rank: failure for failure in failures}, step=lambda rank: 7, **known))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(LOST), "lost"),
        (RuntimeError(TIMED_OUT), "timeout"),
        (DistNetworkError("failed to recv, got 0 bytes"), "lost"),
        (DistStoreError("wait timeout after 5000ms, keys: /worker/1"), "timeout"),
        (RuntimeError("The size of tensor a must match"), "error"),
        (ValueError(LOST), "error"),
        (TimeoutError("a data source timed out"), "error"),
    ],
)
def test_errors_of_communication_are_echoes(error: Exception, kind: str) -> None:
    assert failure_of(error, 0, None).kind == kind


def test_an_error_that_follows_from_lost_communication_is_an_echo() -> None:
    try:
        try:
            raise RuntimeError(LOST)
        except RuntimeError as cause:
            raise CheckpointError("saving step 3 failed") from cause
    except CheckpointError as error:
        assert failure_of(error, 0, 3).kind == "lost"


def test_the_first_nanosecond_counts_and_echoes_do_not() -> None:
    error = told(failure(0, 1, kind="lost"), failure(1, 3), failure(2, 2, message="worse"))
    assert str(error) == "rank 2 failed first, in step 3: ValueError: worse"
    assert error.__notes__ == ["the stack of rank 2"]
    # Whole seconds would have said rank 1.
    assert "rank 1" in str(told(failure(1, 1), failure(2, 2)))


def test_a_silent_death_comes_before_what_others_saw_of_it() -> None:
    echo = failure(0, 1, kind="lost", message=LOST)
    assert str(told(echo, deaths={1: "killed by SIGKILL"})) == "rank 1 died in step 7: killed by SIGKILL"
    assert str(told(echo)).startswith("rank 0 lost its connection to another rank in step 3")
    assert "rank 2 failed first" in str(told(echo, failure(2, 5), deaths={1: "killed by SIGKILL"}))


def test_of_two_deaths_the_first_is_told() -> None:
    assert "rank 3 died" in str(told(deaths={3: "killed by SIGABRT", 0: "killed by SIGABRT"}))


def test_a_hang_comes_before_those_who_waited() -> None:
    waited = failure(0, 1, kind="timeout", message=TIMED_OUT)
    hung = failure(1, 2, kind="hang", type="", message="no progress for 5 s")
    assert str(told(waited, hung)) == "rank 1 hung in step 3: no progress for 5 s, at f.py:1 in f"
    assert "rank 1 stopped answering in step 7: T; rank 0 waited for it at f.py:1 in f" in str(
        told(waited, silent={1: "T"})
    )
    waiting = failure(1, 2, kind="waiting", message="was waiting")
    computing = failure(2, 2, kind="waiting", message="was computing")
    assert str(told(waited, waiting, computing)) == (
        "no rank failed, but the ranks wait for each other: rank 0 in step 3 at f.py:1 in f; rank 1 in step 3 at "
        "f.py:1 in f; rank 2 in step 3 was computing at f.py:1 in f"
    )


def test_input_that_cannot_be_used_keeps_its_kind_and_its_words() -> None:
    before = told(failure(1, 1, type="DataError", message="x.txt: invalid UTF-8", step=None))
    assert (type(before), str(before)) == (DataError, "x.txt: invalid UTF-8")
    later = told(failure(1, 1, type="DataError", message="x.txt: gone"))
    assert (type(later), str(later)) == (DataError, "rank 1, in step 3: x.txt: gone")
    same = told(failure(1, 1, type="NonFiniteError", message="step 3: loss nan"))
    assert (type(same), str(same)) == (NonFiniteError, "step 3: loss nan")
    assert not hasattr(same, "__notes__")


def test_the_operating_system_needs_no_stack() -> None:
    error = told(failure(1, 1, type="PermissionError", message="no"))
    assert (type(error), str(error)) == (RankError, "rank 1 failed first, in step 3: PermissionError: no")
    assert not hasattr(error, "__notes__")
