"""A rank's watch ends its process when others failed or its own work stands still, and not otherwise."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from longspan.attention import transport
from longspan.testing import run_ranks
from longspan.train.failure import watch as watch_module
from longspan.train.failure.heartbeat import Heartbeat
from longspan.train.failure.records import FailureFolder, failure_of
from longspan.train.failure.watch import ENDED_BY_WATCH, Watch, is_communicating


@pytest.fixture
def folder(tmp_path: Path) -> FailureFolder:
    folder = FailureFolder(tmp_path, world=2)
    folder.join(0)
    folder.join(1)
    return folder


def watched(
    monkeypatch: pytest.MonkeyPatch,
    folder: FailureFolder,
    work: Callable[[Heartbeat], None],
    timeout_s: float,
) -> int | None:
    """Exit code of a rank 0 that does this work under a watch; None if the watch lets it live."""
    codes: list[int] = []
    over = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        over.wait()

    monkeypatch.setattr(watch_module.os, "_exit", end)
    monkeypatch.setattr(watch_module, "POLL_S", 0.1)
    monkeypatch.setattr(watch_module, "GRACE_S", 0.1)
    heartbeat = Heartbeat()
    watch = Watch(folder, 0, timeout_s, heartbeat)
    watch.start()
    work(heartbeat)
    over.set()
    watch.stop()
    return codes[0] if codes else None


def still(heartbeat: Heartbeat) -> None:
    heartbeat.beat(3)
    time.sleep(3)


def beating(heartbeat: Heartbeat) -> None:
    for _ in range(150):
        heartbeat.beat(3)
        time.sleep(0.02)


def starting(heartbeat: Heartbeat) -> None:
    """Before the first step nobody knows how long things take."""
    time.sleep(1)


def test_work_that_stands_still_is_ended_and_named(monkeypatch, folder) -> None:
    assert watched(monkeypatch, folder, still, timeout_s=0.3) == ENDED_BY_WATCH
    failure = folder.read()[0]
    assert (failure.kind, failure.step) == ("hang", 3)
    assert failure.place.endswith("in still")
    assert "time.sleep(3)" in failure.trace


@pytest.mark.parametrize("work", [beating, starting])
def test_work_that_moves_or_has_not_begun_is_left_alone(monkeypatch, folder, work) -> None:
    assert watched(monkeypatch, folder, work, timeout_s=0.5) is None
    assert folder.read() == {}


def test_a_rank_alone_may_take_its_time(monkeypatch, tmp_path) -> None:
    alone = FailureFolder(tmp_path / "alone", world=1)
    alone.join(0)
    assert watched(monkeypatch, alone, still, timeout_s=0.3) is None


def test_another_ranks_failure_ends_this_one_as_an_echo(monkeypatch, folder) -> None:
    folder.write(failure_of(ValueError("first"), 1, 3))
    assert watched(monkeypatch, folder, beating, timeout_s=100) == ENDED_BY_WATCH
    assert folder.read()[0].is_echo


@pytest.mark.parametrize(
    ("work", "kind", "message"), [(still, "hang", "no progress for "), (beating, "waiting", "was computing")]
)
def test_a_rank_that_others_waited_for_says_what_it_did(monkeypatch, folder, work, kind, message) -> None:
    def late(heartbeat: Heartbeat) -> None:
        def give_up() -> None:
            folder.write(failure_of(RuntimeError("gloo: Timed out waiting 2500ms"), 1, 3))

        threading.Timer(2, give_up).start()
        work(heartbeat)

    assert watched(monkeypatch, folder, late, timeout_s=2.5) == ENDED_BY_WATCH
    failure = folder.read()[0]
    assert failure.kind == kind
    assert failure.message.startswith(message)


def seen_while(work: Callable[[], None]) -> list[bool]:
    """What a thread sees of the main thread while that works."""
    seen: list[bool] = []
    threading.Timer(0.2, lambda: seen.append(is_communicating())).start()
    work()
    while not seen:
        time.sleep(0.01)
    return seen


def seen_in_ranks(rank: int, world: int) -> list[bool]:
    if rank == 0:
        computing = seen_while(lambda: time.sleep(0.5))
        dist.barrier()
        return computing
    return seen_while(dist.barrier)


def test_waiting_for_others_is_told_from_standing_still() -> None:
    assert run_ranks(seen_in_ranks, 2) == [[False], [True]]


def test_our_own_transport_is_known_as_communication() -> None:
    assert Path(transport.__file__).as_posix().endswith(Path(watch_module._TRANSPORT).as_posix())
