from itertools import islice

import numpy as np
import pytest

from longspan.data import Batches, PackedRows
from longspan.errors import ConfigError
from longspan.spec.batch import BatchPlan
from tests.data.examples import numbered_store

LENGTHS = np.random.default_rng(0).integers(1, 60, 40).tolist()
PLANS = [
    BatchPlan(8, micro_batch, dp) for micro_batch, dp in [(1, 1), (8, 1), (2, 2), (1, 4), (1, 8), (4, 2)]
]


def rows_of_step(plan: BatchPlan, step: int) -> list[tuple[int, ...]]:
    """Token rows that all ranks together see in a step, sorted."""
    rows = PackedRows(numbered_store(LENGTHS), 16, seed=5)
    shares = [Batches(rows, plan, dp_rank).step(step) for dp_rank in range(plan.dp)]
    assert {len(share.micro_batches) for share in shares} == {plan.num_microbatches}
    assert {batch.rows for share in shares for batch in share.micro_batches} == {plan.micro_batch}
    seen = [
        row for share in shares for batch in share.micro_batches for row in batch.tokens_T.reshape(-1, 16)
    ]
    return sorted(tuple(row.tolist()) for row in seen)


@pytest.mark.parametrize("plan", PLANS[1:], ids=str)
def test_every_layout_sees_the_same_rows_in_a_step(plan):
    for step in (0, 3, 1000):
        assert rows_of_step(plan, step) == rows_of_step(PLANS[0], step)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_rank_knows_the_targets_of_the_whole_step(plan):
    rows = PackedRows(numbered_store(LENGTHS), 16, seed=5)
    shares = [Batches(rows, plan, dp_rank).step(7) for dp_rank in range(plan.dp)]
    counted = sum(batch.num_targets for share in shares for batch in share.micro_batches)
    assert [share.num_targets for share in shares] == [counted] * plan.dp


def test_iterating_starts_where_it_is_told_and_never_ends():
    batches = Batches(
        PackedRows(numbered_store([5]), 16, seed=5), BatchPlan(2, 1, 2), dp_rank=1, start_step=40
    )
    assert [data.step for data in islice(batches, 3)] == [40, 41, 42]
    first = next(iter(batches))
    assert first.micro_batches[0].tokens_T.tolist() == batches.rows.row(81).tokens_T.tolist()


def test_a_later_first_row_shifts_every_step():
    rows, plan = PackedRows(numbered_store(LENGTHS), 16, seed=5), BatchPlan(4, 1, 2)
    shifted = [Batches(rows, plan, dp_rank, first_row=12).step(2) for dp_rank in (0, 1)]
    plain = [Batches(rows, plan, dp_rank).step(5) for dp_rank in (0, 1)]
    for ours, same in zip(shifted, plain, strict=True):
        assert (ours.step, ours.num_targets) == (2, same.num_targets)
        for batch, expected in zip(ours.micro_batches, same.micro_batches, strict=True):
            assert batch.tokens_T.tolist() == expected.tokens_T.tolist()


@pytest.mark.parametrize("dp_rank", [-1, 2])
def test_rank_beyond_the_axis_is_refused(dp_rank):
    with pytest.raises(ConfigError, match=f"dp_rank={dp_rank} is not on an axis of dp=2"):
        Batches(PackedRows(numbered_store([5]), 16, seed=5), BatchPlan(2, 1, 2), dp_rank)
