"""Rows of a step are dealt out once each, or refused with the nearest batch that can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.spec.batch import BatchPlan

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, st.integers(0, 3))
def test_a_step_consumes_its_samples_once(microbatches: int, micro_batch: int, dp: int, step: int) -> None:
    plan = BatchPlan(microbatches * micro_batch * dp, micro_batch, dp)
    assert plan.num_microbatches == microbatches
    seen = [
        sample
        for microbatch in range(plan.num_microbatches)
        for dp_coord in range(dp)
        for sample in plan.samples(step, microbatch, dp_coord)
    ]
    assert seen == list(range(step * plan.global_batch, (step + 1) * plan.global_batch))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((10, 1, 4), "global_batch=10 is not a multiple of micro_batch=1 × dp=4; use global_batch=8 or 12"),
        ((3, 2, 4), "global_batch=3 is not a multiple of micro_batch=2 × dp=4; use global_batch=8"),
        ((0, 1, 1), "global_batch must be at least 1, got 0"),
        ((4, -1, 1), "micro_batch must be at least 1, got -1"),
    ],
    ids=str,
)
def test_refusals_name_the_nearest_batch(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BatchPlan(*sizes)
    assert str(raised.value) == words
