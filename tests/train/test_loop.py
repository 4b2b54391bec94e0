"""The loop takes the steps that the run file says, on its own data, and records what really happened."""

import itertools
import json
import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from transformers import AutoModelForCausalLM

from longspan.attention import Meter
from longspan.data import IGNORE, LocalBatch
from longspan.errors import LongspanError
from longspan.spec.layout import Layout
from longspan.spec.run import RunConfig
from longspan.testing import cached_mesh, run_ranks
from longspan.train import loop as loop_module
from longspan.train.groups import Groups
from longspan.train.loop import train
from longspan.train.metrics import StepRecord
from longspan.train.optimizer import build_optimizer
from longspan.train.parallelize import ModelOptions, build_model
from longspan.train.session import Session
from longspan.train.step import evaluate, gradients_of, learning_rate, update
from longspan.train.sums import LossSums
from longspan.train.waiting import counting_waits
from longspan.verify.reference import reference_losses
from tests.train.parity import groups
from tests.verify.runs import write_run

CHANGES = {"schedule.warmup_tokens": 500, "train.dtype": "float64"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def open_alone(run, **changes) -> Session:
    config = RunConfig.load(run, CHANGES | changes)
    return Session.open(config, Groups.alone())


def lines_of(folder, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def steps_of(folder) -> list[dict]:
    return lines_of(folder, "step")


def trained(rank, world, run, changes):
    """The losses of all steps on rank 0."""
    config = RunConfig.load(run, changes)
    train(Session.open(config, groups(config.layout)), quiet=True)
    return [step["loss"] for step in steps_of(config.output.folder)] if rank == 0 else None


def test_the_loop_is_its_steps(run, tmp_path):
    """Loss, norm, rate and evaluation of every record, against the same steps taken by hand."""
    session = open_alone(run, **{"output.folder": str(tmp_path / "out")})
    result = train(session, quiet=True)
    records = steps_of(tmp_path / "out")

    model = session.model()
    optimizer = build_optimizer(model.parameters(), session.config.optimizer)
    evaluations = {0: evaluate(model, session.evaluation_step())}
    for number, record in enumerate(records):
        sums = gradients_of(model, session.training_step(number))
        norm = update(
            model, optimizer, learning_rate(session.config, number), session.config.optimizer.clip_norm
        )
        assert record["step"] == number + 1
        assert record["loss"] == sums.mean
        assert record["grad_norm"] == norm
        assert record["lr"] == learning_rate(session.config, number)
        assert record["targets"] == session.training_step(number).num_targets
        assert record["loss_by_document_length"] == sums.by_document_length
        if number % 2 == 1:
            evaluations[number + 1] = evaluate(model, session.evaluation_step())
    assert len(records) == session.plan.steps
    recorded = lines_of(tmp_path / "out", "evaluation")
    assert [record["step"] for record in recorded] == list(evaluations)
    for record, sums in zip(recorded, evaluations.values(), strict=True):
        assert (record["loss"], record["targets"]) == (sums.mean, sums.targets)
        assert record["loss_by_position"] == sums.by_position
        assert record["loss_by_document_length"] == sums.by_document_length
    first, last = result.first_evaluation, result.last_evaluation
    assert (first.step, first.loss) == (0, recorded[0]["loss"])
    assert (last.step, last.loss) == (4, recorded[-1]["loss"])
    assert (result.first_loss, result.last_loss) == (records[0]["loss"], records[-1]["loss"])
    assert result.eval_loss == last.loss != first.loss
    assert result.peak_bytes > sum(p.nbytes for p in model.parameters())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "weights", dtype=torch.float64)
    ours = dict(model.decoder.named_parameters())
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, ours[name.removeprefix("model.")]), name


def test_the_result_tells_of_an_earlier_run_that_was_set_aside(run, tmp_path):
    changes = {"output.folder": str(tmp_path / "out"), "train.steps": 1, "train.eval_every": 0}
    first, second = (train(open_alone(run, **changes), quiet=True) for _ in range(2))
    assert first.notes == ()
    (note,) = second.notes
    assert f"held an earlier run, which is now in {tmp_path / 'out.1'}" in note


def test_the_rate_follows_a_clock_in_tokens(run):
    config = open_alone(run).config
    assert config.stage_plan.stages[0].tokens_per_step == 242
    assert learning_rate(config, 0) == pytest.approx(config.optimizer.lr * 242 / 500)
    assert learning_rate(config, 1) == pytest.approx(config.optimizer.lr * 484 / 500)
    assert learning_rate(config, config.stage_plan.steps - 1) == pytest.approx(
        config.optimizer.lr * config.schedule.min_ratio
    )


def test_steps_see_different_rows_and_evaluation_sees_held_out_documents(run):
    session = open_alone(run)
    first, second = (session.training_step(step).micro_batches[0].whole for step in (0, 1))
    assert not (first.tokens_T == second.tokens_T).all()
    held_out = {
        session.corpus.evaluation.document(n).tobytes()
        for n in range(session.corpus.evaluation.num_documents)
    }
    trained_on = {
        session.corpus.train.document(n).tobytes() for n in range(session.corpus.train.num_documents)
    }
    assert held_out and not held_out & trained_on
    rows = session.evaluation_step().micro_batches
    assert len(rows) == session.config.train.eval_rows
    for row in rows:
        assert set(row.whole.sample_ids) <= set(range(session.corpus.evaluation.num_documents))


def test_losses_by_position_are_those_of_the_definition(run, tmp_path):
    session = open_alone(run, **{"data.sequence": 500, "data.source": str(_long(tmp_path))})
    sums = evaluate(session.model(), session.evaluation_step())
    decoder = build_model(
        session.spec, session.weights(), Groups.alone(), ModelOptions(torch.float64, torch.float64)
    )
    expected: dict[str, list[float]] = {"0-255": [], "256-1023": []}
    for micro in session.evaluation_step().micro_batches:
        whole = micro.whole
        documents = [
            n for n, length in enumerate(whole.cu_seqlens[1:] - whole.cu_seqlens[:-1]) for _ in range(length)
        ]
        arrays = (whole.tokens_T, whole.positions_T, documents, whole.labels_T)
        with torch.no_grad():
            losses = reference_losses(decoder, *(torch.tensor(list(array)) for array in arrays))
        for position, label, loss in zip(whole.positions_T, whole.labels_T, losses.tolist(), strict=True):
            if label >= 0:
                expected["0-255" if position < 256 else "256-1023"].append(loss)
    assert sums.by_position == pytest.approx({name: sum(v) / len(v) for name, v in expected.items()})
    assert sums.targets == sum(map(len, expected.values()))


def _long(folder):
    corpus = folder / "long"
    corpus.mkdir()
    for number in range(8):
        (corpus / f"{number}.txt").write_text(f"line {number} " * 60)
    return corpus


def test_every_layout_trains_alike_and_the_same_layout_bit_for_bit(run, tmp_path):
    changes = {"train.eval_every": 0} | CHANGES
    four = changes | {"layout.tp": 2, "layout.sp": True, "layout.cp": 2}
    losses = [
        run_ranks(trained, world, str(run), chosen | {"output.folder": str(tmp_path / str(n))})[0]
        for n, (world, chosen) in enumerate(
            [(1, changes), (4, four), (4, four), (2, changes | {"layout.dp": 2})]
        )
    ]
    assert losses[1] == losses[2]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-11)


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(run, tmp_path):
    session = open_alone(
        run, **{"optimizer.lr": 1e300, "schedule.warmup_tokens": 0, "output.folder": str(tmp_path)}
    )
    with pytest.raises(LongspanError, match=r"step \d: loss .* lower optimizer.lr"):
        train(session, quiet=True)
    assert not (tmp_path / "weights").exists()


def test_an_error_while_batches_are_prepared_ends_the_run(run, tmp_path, monkeypatch):
    session = open_alone(run, **{"output.folder": str(tmp_path)})
    real = Session.training_step

    def breaks(self, step):
        if step == 2:
            raise OSError("the disk is gone")
        return real(self, step)

    monkeypatch.setattr(Session, "training_step", breaks)
    with pytest.raises(OSError, match="the disk is gone"):
        train(session, quiet=True)


def test_flops_come_from_exact_pairs_whatever_the_layout(run):
    def flops(rank_world, **changes):
        return run_ranks(step_flops_of, rank_world, str(run), changes)[0]

    alone = flops(1)
    assert flops(2, **{"layout.cp": 2}) == flops(2, **{"layout.dp": 2}) == alone
    full = flops(1, **{"memory.recompute": "full"})
    assert full[0] == alone[0] and full[1] > alone[1]
    session = open_alone(run)
    masks = [micro.attention.masks for micro in session.training_step(0).micro_batches]
    pairs = sum(mask.pairs() for by_window in masks for mask in by_window.values())
    attention = 3.5 * 4 * pairs * session.spec.num_heads * session.spec.head_dim
    assert alone[2] == attention


def step_flops_of(rank, world, run, changes):
    config = RunConfig.load(run, changes)
    session = Session.open(config, groups(config.layout))
    flops = loop_module._flops(session, session.training_step(0))
    return flops.useful, flops.executed, flops.attention_useful


def test_recompute_runs_every_layer_twice_with_the_same_gradients(run):
    def calls_and_gradient(recompute):
        session = open_alone(run, **{"memory.recompute": recompute, "train.steps": 1, "train.eval_every": 0})
        model, count = session.model(), [0]
        for layer in model.decoder.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        gradients_of(model, session.training_step(0))
        return count[0], model.decoder.embed_tokens.weight.grad.clone()

    micro_batches, layers = 2, 2
    (once, gradient), (twice, again) = calls_and_gradient("none"), calls_and_gradient("full")
    assert (once, twice) == (micro_batches * layers, 2 * micro_batches * layers)
    assert torch.equal(gradient, again)


def test_weights_count_in_the_reported_loss():
    local = LocalBatch(*map(torch.tensor, ([5, 6, 7], [0, 1, 2], [6, 7, IGNORE], [1.0, 0.5, 0.0], [3, 3, 3])))
    sums = LossSums.zero().plus(torch.tensor([2.0, 4.0, 9.0]), local)
    assert (sums.mean, sums.targets) == ((2.0 + 0.5 * 4.0) / 2, 2)


def waits_counted(rank, world):
    """How often collectives count waiting: a clock that ticks when read."""
    meter, pair = Meter(), groups(Layout(cp_inner=2))
    shared = DTensor.from_local(torch.ones(4), cached_mesh((2,), ("tp",)), [Partial()])
    counts = []
    with patch("longspan.attention.meter.time", SimpleNamespace(perf_counter=itertools.count().__next__)):
        with counting_waits(meter):
            for collective in (
                lambda: pair.add_over_dp_cp(torch.ones(4)),
                lambda: dist.reduce_scatter_single(torch.ones(1), torch.ones(2), group=pair.dp_cp),
                lambda: shared.full_tensor().sum(),
                lambda: torch.ones(4).sum(),
            ):
                before = meter.wait_s
                collective()
                counts.append(meter.wait_s - before)
        pair.add_over_dp_cp(torch.ones(4))
    return counts


def test_waiting_is_counted():
    assert run_ranks(waits_counted, 2) == [[1, 1, 1, 0]] * 2


def test_a_wait_inside_a_wait_counts_once():
    meter = Meter()
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    with patch("longspan.attention.meter.time", clock), meter.waiting(), meter.waiting():
        pass
    assert meter.wait_s == 2


def test_records_know_their_rates():
    record = StepRecord(
        step=1, loss=1.0, grad_norm=1.0, lr=1.0, tokens=100, targets=99, rows=2, sequence=50, stage=1,
        seen_tokens=100, step_s=0.5,
        wait_s=0.1, useful_flops=10, executed_flops=20, logits_flops=5, peak_rss_bytes=1,
    )  # fmt: skip
    assert record.tokens_per_s == 200
    assert math.isclose(record.wait_share, 0.2)
