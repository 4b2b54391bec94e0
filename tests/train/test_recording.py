"""Files that a run leaves behind, read back."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longspan.spec.run import RunConfig
from longspan.spec.run_sections import OutputSection
from longspan.train.recording import recording
from tests.train.test_metrics import CONFIG, EVALUATION, RECORD


def config_in(folder: Path, tensorboard: bool = True) -> RunConfig:
    return CONFIG.model_copy(update={"output": OutputSection(folder=folder, tensorboard=tensorboard)})


def write(config: RunConfig, rank: int = 0, quiet: bool = True) -> None:
    with recording(config, torch.device("cpu"), rank=rank, quiet=quiet) as record:
        record(RECORD)
        record(dataclasses.replace(RECORD, step=4, loss=math.nan))
        record(EVALUATION)


def test_jsonl_holds_the_run_every_step_and_every_evaluation(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    write(config)
    text = (tmp_path / "steps.jsonl").read_text()
    run, first, second, evaluation = [json.loads(line) for line in text.splitlines()]
    assert run["kind"] == "run"
    assert run["config"] == json.loads(config.model_dump_json())
    assert first["kind"] == "step"
    assert (first["step"], first["loss"], first["tokens_per_s"]) == (3, 2.5, 16384)
    assert (first["tp"], first["cp"], first["sp"], first["dtype"]) == (2, 2, True, "float32")
    assert first["loss_by_document_length"] == {"64-": 2.5}
    assert second["loss"] == "nan"
    assert evaluation["kind"] == "evaluation"
    assert (evaluation["step"], evaluation["loss"], evaluation["targets"]) == (4, 2.25, 4000)
    assert evaluation["loss_by_position"] == {"0-63": 2.75, "64-": 1.75}
    assert (evaluation["tp"], evaluation["cp"], evaluation["sp"]) == (2, 2, True)


def test_jsonl_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    write(config_in(tmp_path))
    write(config_in(tmp_path))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert kinds == ["run", "step", "step", "evaluation"] * 2


def test_tensorboard_holds_scalars(tmp_path: Path) -> None:
    write(config_in(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = {
        "loss",
        "lr",
        "tokens_per_s",
        "wait_share",
        "loss_by_position/64-",
        "loss_by_document_length/64-",
    }
    assert names <= set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("tokens_per_s")] == [(3, 16384), (4, 16384)]
    for name, value in [
        ("eval_loss", 2.25),
        ("eval_loss_by_position/0-63", 2.75),
        ("eval_loss_by_document_length/64-", 2.25),
    ]:
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(4, value)]


def test_a_resumed_run_hides_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    write(config_in(tmp_path))
    with recording(
        config_in(tmp_path), torch.device("cpu"), rank=0, quiet=True, resumed_from_step=3
    ) as record:
        record(dataclasses.replace(RECORD, step=4, loss=1.5))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["resumed_from_step"] for line in lines if line["kind"] == "run"] == [None, 3]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [3, 4, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5), (4, 1.5)]


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    write(config_in(tmp_path, tensorboard=False))
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]


def test_only_rank_0_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(config_in(tmp_path), rank=1, quiet=False)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_table_goes_to_stderr_unless_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(config_in(tmp_path), quiet=True)
    assert capfd.readouterr() == ("", "")
    write(config_in(tmp_path), quiet=False)
    out, err = capfd.readouterr()
    assert out == ""
    assert "tokens/s" in err and "16,384" in err and "held out" in err
