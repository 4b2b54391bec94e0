"""Weights that are shared out or copied over dp × cp: memory, evaluation, and what must not be confused."""

import pytest
import torch

from longspan.data import IGNORE
from longspan.spec.layout import Layout
from longspan.spec.run import RunConfig
from longspan.testing import run_ranks
from longspan.train.gradients import gradient
from longspan.train.optimizer import build_optimizer
from longspan.train.session import Session
from longspan.train.step import evaluate, gradients_of, update
from tests.train.parity import groups
from tests.verify.runs import write_run

# Three rows to evaluate: some ranks have none left.
EVALUATION = {"train.dtype": "float64", "train.eval_rows": 3, "batch.global_batch": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(write_run(tmp_path_factory.mktemp("run")))


def open_session(run, sizes) -> Session:
    config = RunConfig.load(run, EVALUATION | {f"layout.{axis}": size for axis, size in sizes.items()})
    return Session.open(config, groups(config.layout))


def evaluation(rank, world, run, sizes):
    """Sums over all ranks, and how many rows and targets this rank had."""
    session = open_session(run, sizes)
    batches = session.evaluation_step()
    targets = sum(int((micro.local.labels_t != IGNORE).sum()) for micro in batches.micro_batches)
    sums = evaluate(session.model(), batches)
    return sums.mean, sums.targets, len(batches.micro_batches), targets


@pytest.mark.parametrize("sizes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"dp_shard": 4}], ids=str)
def test_ranks_without_a_row_evaluate_along_and_add_nothing(run, sizes):
    ((mean, targets, rows, _),) = run_ranks(evaluation, 1, run, {})
    assert rows == 3
    seen = run_ranks(evaluation, Layout(**sizes).world, run, sizes)
    assert len({here[2] for here in seen}) == 1
    assert [here[3] for here in seen].count(0) == (1 if Layout(**sizes).dp == 4 else 0)
    for here in seen:
        assert here[0] == pytest.approx(mean, rel=1e-13)
        assert here[1] == targets == sum(other[3] for other in seen)


def held_bytes(rank, world, run, sizes):
    """Bytes of this rank's parts of weights, gradients and AdamW's moments after a step; bytes of all weights."""
    session = open_session(run, sizes)
    model = session.model()
    optimizer = build_optimizer(model.parameters(), session.config.optimizer)
    gradients_of(model, session.training_step(0))
    update(model, optimizer, lr=1e-3, clip_norm=1.0)
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    held = (*model.parameters(), *(gradient(p) for p in model.parameters()), *moments)
    return sum(tensor.to_local().nbytes for tensor in held), session.spec.num_parameters * 8


def test_shared_weights_gradients_and_moments_take_a_share_of_the_memory(run):
    copied, weights = run_ranks(held_bytes, 4, run, {"dp_replicate": 4})[0]
    whole = 4 * weights
    assert copied == whole
    parts = run_ranks(held_bytes, 4, run, {"dp_shard": 4})
    assert sum(part for part, _ in parts) == whole
    assert max(part for part, _ in parts) < 0.3 * whole
    hybrid = run_ranks(held_bytes, 4, run, {"dp_replicate": 2, "dp_shard": 2})
    assert sum(part for part, _ in hybrid) == 2 * whole


def gathered(rank, world, run):
    session = open_session(run, {"dp_shard": 2})
    model = session.model()
    with torch.no_grad():
        model.token_losses(session.training_step(0).micro_batches[0], 1)
    with pytest.raises(RuntimeError, match="weights are gathered; call release"):
        model.parameters()
    evaluate(model, session.evaluation_step())
    gradients_of(model, session.training_step(0))
    return len(model.parameters())


def test_gathered_weights_are_not_taken_for_parameters(run):
    assert len(set(run_ranks(gathered, 2, run))) == 1
