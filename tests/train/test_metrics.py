"""Rates from counts, and what describes a run."""

import dataclasses
import math

import pytest
import torch

from longspan.spec.layout import Layout
from longspan.spec.run import RunConfig
from longspan.spec.run_sections import ModelSection
from longspan.train.metrics import EvaluationRecord, StepRecord, describe_run, json_ready, run_tags

RECORD = StepRecord(
    step=3,
    loss=2.5,
    grad_norm=0.75,
    lr=1e-3,
    tokens=8192,
    targets=8000,
    rows=2,
    sequence=4096,
    stage=1,
    seen_tokens=24576,
    step_s=0.5,
    wait_s=0.05,
    useful_flops=4_000_000_000,
    executed_flops=6_000_000_000,
    logits_flops=1_000_000_000,
    peak_rss_bytes=2**30,
    peak_bytes=3 * 2**20,
    peak_source="census",
    loss_by_position={"0-63": 3.0, "64-": 2.0},
    loss_by_document_length={"64-": 2.5},
)
EVALUATION = EvaluationRecord(
    step=4,
    loss=2.25,
    loss_by_position={"0-63": 2.75, "64-": 1.75},
    loss_by_document_length={"64-": 2.25},
    targets=4000,
    seconds=0.125,
)
CONFIG = RunConfig(model=ModelSection(config="config.json"), layout=Layout(tp=2, cp_inner=2, sp=True))


def test_rates_follow_from_counts_and_time() -> None:
    values = RECORD.values()
    assert values["tokens_per_s"] == 16384
    assert values["sequences_per_s"] == 4
    assert values["useful_flops_per_s"] == 8e9
    assert values["executed_flops_per_s"] == 12e9
    assert values["wait_share"] == pytest.approx(0.1)
    assert values["loss_by_position"] == {"0-63": 3.0, "64-": 2.0}
    assert values["loss_by_document_length"] == {"64-": 2.5}


def test_records_are_frozen() -> None:
    for record in (RECORD, EVALUATION):
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.loss = 0.0


def test_run_is_described_with_cp_and_sp_apart() -> None:
    tags = run_tags(CONFIG, torch.device("cpu"))
    assert (tags["tp"], tags["cp"], tags["sp"], tags["dtype"], tags["device"]) == (
        2,
        2,
        True,
        "float32",
        "cpu",
    )
    run = describe_run(CONFIG, torch.device("cpu"))
    assert run["versions"]["torch"] == torch.__version__
    assert run["config"]["layout"]["cp_inner"] == 2
    assert tags.items() <= run.items()


def test_numbers_that_json_lacks_become_words() -> None:
    assert json_ready({"loss": math.nan, "by": {"a": -math.inf, "b": 1.5}, "n": 2}) == {
        "loss": "nan",
        "by": {"a": "-inf", "b": 1.5},
        "n": 2,
    }
