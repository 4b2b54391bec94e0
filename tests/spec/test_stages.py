"""Stages read on where the one before stopped, and one clock runs through all of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.spec.batch import BatchPlan
from longspan.spec.run_sections import ScheduleSection
from longspan.spec.stages import StagePlan

batches = st.builds(BatchPlan, st.sampled_from([4, 8, 12]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
plans = st.lists(st.tuples(st.integers(1, 97), st.integers(1, 6), batches), min_size=1, max_size=5).map(
    StagePlan.of
)


def spans(plan: StagePlan) -> list[tuple[int, int]]:
    """Tokens of the stream that each step reads, as its rows say."""
    found = []
    for step in range(plan.steps):
        stage = plan.stage_of(step)
        rows = stage.rows(step)
        found.append((rows.start * stage.sequence, rows.stop * stage.sequence))
    return found


@given(plans)
def test_no_token_is_consumed_twice_and_less_than_a_row_is_passed_over(plan: StagePlan) -> None:
    read = spans(plan)
    assert read[0][0] == 0
    for step, ((_, end), (start, _)) in enumerate(pairwise(read), 1):
        changes = plan.stage_of(step) != plan.stage_of(step - 1)
        passed_over = start - end
        assert 0 <= passed_over < (plan.stage_of(step).sequence if changes else 1)


@given(plans)
def test_the_clock_counts_every_token_once(plan: StagePlan) -> None:
    clock = [plan.tokens_before(step) for step in range(plan.steps + 1)]
    assert clock[0] == 0
    assert [after - before for before, after in pairwise(clock)] == [
        end - start for start, end in spans(plan)
    ]
    assert clock[-1] == plan.total_tokens
    assert plan.total_tokens == sum(s.steps * s.batch.global_batch * s.sequence for s in plan.stages)


@given(plans)
def test_every_step_belongs_to_one_stage(plan: StagePlan) -> None:
    assert plan.steps == sum(stage.steps for stage in plan.stages)
    numbers = [plan.stage_of(step).number for step in range(plan.steps)]
    assert numbers == [stage.number for stage in plan.stages for _ in range(stage.steps)]
    inside = [plan.stage_of(step).inside(step) for step in range(plan.steps)]
    assert inside == [step for stage in plan.stages for step in range(stage.steps)]


@given(plans, st.sampled_from(["cosine", "wsd"]))
def test_the_rate_rises_then_falls_over_all_stages(plan: StagePlan, kind: str) -> None:
    warmup = plan.total_tokens // 3
    section = ScheduleSection.model_validate({"kind": kind, "warmup_tokens": warmup})
    factors = [section.factor(plan.tokens_before(step + 1), plan.total_tokens) for step in range(plan.steps)]
    risen = sum(plan.tokens_before(step + 1) < warmup for step in range(plan.steps))
    assert factors[:risen] == sorted(factors[:risen])
    assert factors[risen:] == sorted(factors[risen:], reverse=True)
    assert factors[-1] == pytest.approx(section.min_ratio)


def test_a_worked_example() -> None:
    plan = StagePlan.of(
        [(10, 3, BatchPlan(1, 1, 1)), (40, 2, BatchPlan(2, 1, 2)), (15, 1, BatchPlan(1, 1, 1))]
    )
    first, second, third = plan.stages
    # Tokens 0 to 29; then from 40 on, the first multiple of 40 after them; then from 210 on, after 200.
    assert [first.rows(0), first.rows(2)] == [range(0, 1), range(2, 3)]
    assert [second.rows(3), second.rows(4)] == [range(1, 3), range(3, 5)]
    assert third.rows(5) == range(14, 15)
    assert [plan.tokens_before(step) for step in range(7)] == [0, 10, 20, 30, 110, 190, 205]
    assert plan.longest is second


def test_after_the_last_step_its_stage_goes_on() -> None:
    plan = StagePlan.of([(10, 1, BatchPlan(1, 1, 1)), (20, 2, BatchPlan(3, 1, 1))])
    assert plan.stage_of(100).number == 2
    assert plan.tokens_before(5) == 10 + 4 * 60
    assert plan.stages[1].rows(4) == range(1 + 9, 1 + 12)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "a run needs a stage"),
        ([(0, 1, BatchPlan(1, 1, 1))], "1 steps with rows of 0 tokens"),
        ([(5, 0, BatchPlan(1, 1, 1))], "0 steps with rows of 5 tokens"),
    ],
    ids=["none", "no tokens", "no steps"],
)
def test_empty_plans_are_refused(sizes: list[tuple[int, int, BatchPlan]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StagePlan.of(sizes)
