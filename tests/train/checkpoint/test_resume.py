"""Which checkpoint a run goes on from, and what it refuses to go on from."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import CheckpointError
from longspan.model import InitialWeights, save_hf
from longspan.spec.run import RunConfig
from longspan.train.checkpoint.folder import step_folder
from longspan.train.checkpoint.manifest import Manifest, Progress
from longspan.train.checkpoint.output import output_folder
from longspan.train.checkpoint.resume import find_start
from tests.verify.runs import write_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def load(file: Path, **changes: Any) -> RunConfig:
    return RunConfig.load(file, changes)


def leave(config: RunConfig, *steps: int) -> Path:
    """Checkpoints of the run in its output folder; only their manifests are real."""
    with output_folder(config, goes_on_from=None) as output:
        root = config.output.folder / "checkpoints"
        for step in steps:
            step_folder(root, step).mkdir()
            Manifest(
                run_id=output.run_id,
                progress=Progress(step, config.stage_plan.tokens_before(step)),
                world=1,
                model=json.loads(config.model_spec().model_dump_json()),
                config=config.model_dump(mode="json"),
                corpus="",
                versions={},
            ).write(step_folder(root, step))
        return root


@pytest.mark.parametrize("wanted", [True, "latest"])
def test_latest_is_the_newest(file: Path, wanted: str | bool) -> None:
    root = leave(load(file), 2, 10)
    (root / "step-00000012.tmp").mkdir()
    start = find_start(load(file), wanted)
    assert start.found is not None
    assert (start.found.step, start.found.own) == (10, True)
    assert start.notes == (f"going on from {root / 'step-00000010'}: 10 steps, 2,420 tokens",)


def test_without_resume_a_run_starts_anew(file: Path) -> None:
    leave(load(file), 2)
    assert find_start(load(file), False).found is None


def test_an_older_one_by_its_path(file: Path) -> None:
    root = leave(load(file), 2, 10)
    start = find_start(load(file), str(root / "step-00000002"))
    assert start.found is not None and start.found.own and start.found.step == 2


def refusal(config: RunConfig, wanted: str | bool, **flags: bool) -> str:
    with pytest.raises(CheckpointError) as refused:
        find_start(config, wanted, **flags)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_not_there_is_named(file: Path, tmp_path: Path) -> None:
    config = load(file)
    root = config.output.folder / "checkpoints"
    assert refusal(config, True) == f"there is no checkpoint in {root}; start without --resume"
    assert refusal(config, str(tmp_path / "no")).startswith(
        f"{tmp_path / 'no'} is no folder; give a checkpoint"
    )
    assert refusal(config, str(tmp_path)).startswith(
        f"{tmp_path} is no complete checkpoint: it has no manifest"
    )


def test_a_newest_one_without_manifest_is_named_with_the_one_before(file: Path) -> None:
    root = leave(load(file), 2, 10)
    (root / "step-00000010" / "manifest.json").unlink()
    assert refusal(load(file), True) == (
        f"{root / 'step-00000010'} is no complete checkpoint: it has no manifest.json; an earlier one is complete: "
        f"--resume {root / 'step-00000002'}"
    )
    (root / "step-00000002" / "manifest.json").unlink()
    assert refusal(load(file), True).endswith("; there is no earlier one beside it")


def test_a_checkpoint_of_another_run_must_be_trusted(file: Path, tmp_path: Path) -> None:
    folder = leave(load(file), 2) / "step-00000002"
    other = load(file, **{"output.folder": str(tmp_path / "other")})
    assert refusal(other, str(folder)) == (
        f"{folder} was not written by the run in {tmp_path / 'other'}; add --trust-checkpoint if you know where it "
        "comes from"
    )
    start = find_start(other, str(folder), trust=True)
    assert start.found is not None and not start.found.own
    # The same folder with another run in it.
    (load(file).output.folder / "run-id").write_text("another\n")
    assert "was not written by" in refusal(load(file), True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.seed": 1}, "train.seed was 0, is 1"),
        ({"train.steps": 9}, "train.steps was 4, is 9"),
        ({"train.dtype": "bfloat16"}, "train.dtype was 'float32', is 'bfloat16'"),
        ({"data.sequence": 99}, "data.sequence was 121, is 99"),
        ({"batch.global_batch": 4}, "batch.global_batch was 2, is 4"),
        ({"optimizer.lr": 0.5}, "optimizer.lr was 0.001, is 0.5"),
        ({"schedule.kind": "wsd"}, "schedule.kind was 'cosine', is 'wsd'"),
        ({"model.spec.num_heads": 2}, "model.num_heads was 4, is 2"),
        ({"model.rope.theta": 5.0}, "model.rope.theta was 10000.0, is 5.0"),
    ],
)
def test_what_changes_the_course_is_refused_with_both_values(file: Path, changes: Any, words: str) -> None:
    folder = leave(load(file), 2) / "step-00000002"
    assert refusal(load(file, **changes), True) == (
        f"{folder} is of another run: {words}; go on as before, or --allow-changes"
    )
    if changes.keys() & {"data.sequence", "batch.global_batch"}:
        with pytest.raises(CheckpointError, match="saw 484 tokens in 2 steps, the run file means"):
            find_start(load(file, **changes), True, allow_changes=True)
        return
    start = find_start(load(file, **changes), True, allow_changes=True)
    assert start.found is not None
    assert start.notes[1:] == (f"changed since the checkpoint: {words}",)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout.tp": 2, "layout.sp": True},
        {"layout.dp": 2},
        {"attention.transport": "ring", "attention.kernel": "reference"},
        {"memory.recompute": "full"},
        {"checkpoint.every": 3, "checkpoint.keep": 5, "checkpoint.asynchronous": False},
        {"output.tensorboard": True},
        {"train.log_every": 5, "train.eval_every": 0, "train.timeout_s": 9.0, "train.threads": 1},
        {"batch.micro_batch": 2},
        {"data.source": "elsewhere"},
    ],
)
def test_what_changes_only_rounding_or_records_is_free(file: Path, changes: Any) -> None:
    leave(load(file), 2)
    start = find_start(load(file, **changes), True)
    assert start.found is not None and len(start.notes) == 1


def test_a_folder_of_safetensors_is_taken_as_weights(file: Path, tmp_path: Path) -> None:
    config = load(file)
    spec = config.model_spec()
    save_hf(tmp_path / "weights", spec, InitialWeights(spec, 5).items())
    start = find_start(config, str(tmp_path / "weights"))
    assert start.found is None
    assert start.config.model.weights == tmp_path / "weights"
    assert start.config.model_spec() == spec
    (note,) = start.notes
    assert note.endswith("weights are taken from it, optimizer and schedule start anew")
    wider = load(file, **{"model.spec.intermediate_size": 64})
    assert refusal(wider, str(tmp_path / "weights")).startswith(
        f"{tmp_path / 'weights'} holds another model: model.intermediate_size was 48, is 64"
    )
