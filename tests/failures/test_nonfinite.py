"""A loss or gradient that is not finite is traced to its rank, rows, layer and weights, and stops or skips the step."""

import json
import math
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from longspan.errors import NonFiniteError
from longspan.model import Decoder
from longspan.spec.layout import Layout
from longspan.spec.run import RunConfig
from longspan.testing import run_ranks
from longspan.train import loop as loop_module
from longspan.train.forward import ParallelModel
from longspan.train.loop import train
from longspan.train.optimizer import build_optimizer
from longspan.train.session import Session
from longspan.train.step import gradients_of, learning_rate, update
from tests.train.parity import groups
from tests.verify.runs import write_run

FLOAT64 = {"train.dtype": "float64", "train.eval_every": 0}
STEP = 2  # counted from 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


class Spoiled(torch.autograd.Function):
    """Its input, with a gradient that is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * math.nan


def in_loss(real, rank, model, micro, num_targets):
    loss, nll_t = real(model, micro, num_targets)
    if model.groups.rank != rank:
        return loss, nll_t
    at = (micro.local.labels_t >= 0).nonzero()[0]
    nll_t[at] = math.inf
    return loss * math.nan, nll_t


def in_gradient(real, rank, model, micro, num_targets):
    hooks = []
    if model.groups.rank == rank:
        mlp = model.decoder.layers[0].mlp
        hooks.append(mlp.register_forward_hook(lambda module, inputs, output: Spoiled.apply(output)))
    loss, nll_t = real(model, micro, num_targets)
    return loss, nll_t, hooks


def in_weight(real, rank, model, micro, num_targets):
    weight = dict(model.decoder.named_parameters())["layers.1.mlp.up_proj.weight"].data
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    if model.groups.rank == rank:
        local.view(-1)[0] = math.nan
    return real(model, micro, num_targets)


def spoiling(where: str, rank: int, steps: set[int]):
    """Puts the fault into every run of these steps."""
    real_losses, real_step, now = ParallelModel.token_losses, loop_module.gradients_of, [-1]
    fault = {"loss": in_loss, "gradient": in_gradient, "weight": in_weight}[where]

    def token_losses(self, micro, num_targets):
        if now[0] not in steps:
            return real_losses(self, micro, num_targets)
        result = fault(real_losses, rank, self, micro, num_targets)
        if len(result) == 3:
            for hook in result[2]:
                hook.remove()
        return result[:2]

    def step_gradients(model, batches):
        now[0] = batches.step
        return real_step(model, batches)

    return patch.multiple(ParallelModel, token_losses=token_losses), patch.object(
        loop_module, "gradients_of", step_gradients
    )


def spoiled(rank, world, run, changes, where, bad_rank, steps=(STEP,)):
    """How the run ended on this rank: its result, or the error's words; and its records."""
    config = RunConfig.load(run, FLOAT64 | changes)
    session = Session.open(config, groups(config.layout))
    losses, gradients = spoiling(where, bad_rank, set(steps))
    with losses, gradients:
        try:
            ended = train(session, quiet=True)
        except NonFiniteError as error:
            ended = str(error)
    lines = (config.output.folder / "steps.jsonl").read_text().splitlines() if rank == 0 else []
    return ended, [line for line in map(json.loads, lines) if line["kind"] == "step"]


LAYOUTS = {
    "cp": {"layout.cp": 2},
    "dp": {"layout.dp": 2},
    "sharded": {"layout.dp_shard": 2},
    "tp": {"layout.tp": 2, "layout.sp": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_is_traced_to_its_rank_rows_and_documents(run, tmp_path, layout) -> None:
    changes = LAYOUTS[layout] | {"output.folder": str(tmp_path / "out")}
    outcomes = run_ranks(spoiled, 2, str(run), changes, "loss", 1)
    words, records = outcomes[0]
    assert words == outcomes[1][0]
    assert words.startswith("step 3: loss ")
    config = RunConfig.load(run, FLOAT64 | changes)
    session = Session.open(config, groups_of_rank(config.layout, 1))
    micro = session.training_step(STEP).micro_batches[0]
    at = int((micro.local.labels_t >= 0).nonzero()[0])
    place = int(micro.attention.sharding.index(session.groups.coordinate("cp"))[at])
    document = int(micro.whole.sample_ids[(micro.whole.cu_seqlens[1:] <= place).sum()])
    stage = session.plan.stage_of(STEP)
    row = stage.rows(STEP)[stage.batch.samples(0, 0, session.groups.coordinate("dp")).start]
    assert (
        f"token losses are not finite on rank 1 in micro-batch 0: rows {row}, documents {document};" in words
    )
    assert "first of all came a token loss in micro-batch 0 on rank 1;" in words
    assert [record["step"] for record in records] == [1, 2]
    assert not (tmp_path / "out" / "weights").exists()


def groups_of_rank(layout: Layout, rank: int):
    """The place of a rank, for what needs no communication."""
    from dataclasses import replace

    from longspan.train.groups import Groups

    return replace(Groups.alone(), layout=layout, rank=rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_is_traced_to_its_layer(run, tmp_path, layout) -> None:
    changes = LAYOUTS[layout] | {"output.folder": str(tmp_path / "out")}
    outcomes = run_ranks(spoiled, 2, str(run), changes, "gradient", 1)
    words = outcomes[0][0]
    assert words == outcomes[1][0]
    assert "token losses" not in words
    place = "first of all came the gradient of the input of layers.0.mlp in micro-batch 0 on "
    assert f"{place}rank 1;" in words or (layout == "tp" and f"{place}ranks 0, 1;" in words)
    assert "gradients that are not finite: embed_tokens.weight, layers.0." in words
    assert "layers.1" not in words
    assert "weights that are not finite" not in words


def test_a_weight_is_named_with_its_rank(run, tmp_path) -> None:
    changes = LAYOUTS["sharded"] | {"output.folder": str(tmp_path / "out")}
    words = run_ranks(spoiled, 2, str(run), changes, "weight", 1)[0][0]
    assert "weights that are not finite: layers.1.mlp.up_proj.weight on rank 1;" in words
    assert "first of all came the output of layers.1.mlp in micro-batch 0 on ranks 0, 1;" in words


def losses_without(run, changes, missing):
    """Losses of a run taken by hand in which some steps make no update."""
    config = RunConfig.load(run, FLOAT64 | changes)
    session = Session.open(config, groups_of_rank(Layout(), 0))
    model = session.model()
    optimizer = build_optimizer(model.parameters(), config.optimizer)
    losses = []
    for step in range(config.train.steps):
        losses.append(gradients_of(model, session.training_step(step)).mean)
        if step not in missing:
            update(model, optimizer, learning_rate(config, step), config.optimizer.clip_norm)
    return losses


def test_a_skipped_step_is_as_if_it_had_made_no_update(run, tmp_path) -> None:
    changes = {"train.nonfinite": "skip", "train.steps": 5, "output.folder": str(tmp_path / "out")}
    parallel = changes | LAYOUTS["cp"]
    outcomes = run_ranks(spoiled, 2, str(run), parallel, "gradient", 0, (1, 3))
    result, records = outcomes[0]
    assert (result.skipped_steps, result.last_step) == (2, 5)
    assert [record["skipped"] for record in records] == [False, True, False, True, False]
    assert "layers.0.mlp" in records[1]["nonfinite"] and records[0]["nonfinite"] is None
    assert [record["loss"] for record in records] == pytest.approx(
        losses_without(run, changes, missing={1, 3}), rel=1e-10
    )
    # The control: updates matter.
    assert records[4]["loss"] != pytest.approx(losses_without(run, changes, missing=set())[4], rel=1e-6)
    assert (tmp_path / "out" / "weights" / "config.json").exists()


def test_too_many_skipped_steps_in_a_row_stop_the_run(run, tmp_path) -> None:
    changes = {"train.nonfinite": "skip", "train.nonfinite_limit": 2, "train.steps": 6}
    changes |= {"output.folder": str(tmp_path / "out")} | LAYOUTS["dp"]
    words, records = run_ranks(spoiled, 2, str(run), changes, "loss", 0, (1, 3, 4))[0]
    assert words.startswith("step 5: loss ")
    assert "train.nonfinite_limit=2" in words
    assert [record["skipped"] for record in records] == [False, True, False, True]


def test_a_fault_that_does_not_come_again_is_told_as_one(run, tmp_path) -> None:
    changes = {"output.folder": str(tmp_path / "out")}
    once = run_ranks(partial(spoiled_once), 1, str(run), changes)[0]
    assert "the same step run again was finite, so suspect a machine" in once


def spoiled_once(rank, world, run, changes):
    config = RunConfig.load(run, FLOAT64 | changes)
    real = loop_module.gradients_of

    def once(model, batches):
        sums = real(model, batches)
        next(Decoder.parameters(model.decoder)).grad.view(-1)[0] = math.nan
        return sums

    with patch.object(loop_module, "gradients_of", once), pytest.raises(NonFiniteError) as error:
        train(Session.open(config, groups(config.layout)), quiet=True)
    return str(error.value)
