"""The order of pipeline work, run by a simulator that knows only what each pass must wait for."""

from fractions import Fraction

import pytest

from longspan.errors import ConfigError, UnsupportedError
from longspan.spec.schedule import Schedule, Work

GRID = [(pp, microbatches) for pp in (1, 2, 3, 4) for microbatches in (1, 2, 3, 8)]


def run(schedule: Schedule) -> tuple[int, list[int]]:
    """Time of the step in passes, and the most micro-batches that each stage held."""
    stages = range(schedule.pp)
    queues = [list(schedule.work(stage)) for stage in stages]
    ended: dict[tuple[int, str, int], int] = {}
    clock, held, most = 0, [0] * schedule.pp, [0] * schedule.pp
    while any(queues):
        ready = [
            stage for stage in stages if queues[stage] and is_ready(queues[stage][0], stage, ended, schedule)
        ]
        assert ready, f"deadlock at {clock}: {[queue[:1] for queue in queues]}"
        clock += 1
        for stage in ready:
            work = queues[stage].pop(0)
            ended[stage, work.kind, work.microbatch] = clock
            held[stage] += 1 if work.kind == "forward" else -1
            most[stage] = max(most[stage], held[stage])
    return clock, most


def is_ready(work: Work, stage: int, ended: dict[tuple[int, str, int], int], schedule: Schedule) -> bool:
    if work.kind == "forward":
        return stage == 0 or (stage - 1, "forward", work.microbatch) in ended
    below = (stage, "forward", work.microbatch) in ended
    return below and (stage == schedule.pp - 1 or (stage + 1, "backward", work.microbatch) in ended)


@pytest.mark.parametrize(("pp", "microbatches"), GRID)
def test_every_pass_runs_once_and_no_stage_waits_for_ever(pp: int, microbatches: int) -> None:
    schedule = Schedule(microbatches, pp)
    clock, most = run(schedule)
    for stage in range(pp):
        work = schedule.work(stage)
        assert sorted(work) == sorted(set(work))
        assert len(work) == 2 * microbatches
    assert most == [schedule.in_flight(stage) for stage in range(pp)]
    busy = Fraction(2 * microbatches, clock)
    assert schedule.bubble == pytest.approx(float(1 - busy))


def test_one_stage_is_gradient_accumulation() -> None:
    schedule = Schedule(2)
    assert schedule.work(0) == (
        Work("forward", 0, 0),
        Work("backward", 0, 0),
        Work("forward", 1, 0),
        Work("backward", 1, 0),
    )
    assert (schedule.in_flight(0), schedule.bubble) == (1, 0.0)


def test_what_has_no_order_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="vpp=2"):
        Schedule(4, pp=2, vpp=2)
    with pytest.raises(ConfigError, match="num_microbatches must be at least 1, got 0"):
        Schedule(0)
    with pytest.raises(ConfigError, match="stage 2 is not one of 2"):
        Schedule(4, pp=2).work(2)
