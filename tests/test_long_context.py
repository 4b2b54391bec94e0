"""The job of the two examples, shrunk: a Hugging Face model made at 1k goes on to 8k and learns from far away."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from longspan.spec.run import RunConfig
from tests.cli.commands import done

EXAMPLES = Path(__file__).parent.parent / "examples"
LIBRARY = Path(sysconfig.get_path("stdlib"))
SOURCE = json.dumps([str(LIBRARY / folder / "*.py") for folder in ("asyncio", "email", "unittest")])
COMMON = {
    "data.source": SOURCE,
    "data.eval_documents": 0.2,
    "output.tensorboard": "false",
    "train.threads": 1,
}
SHORT = COMMON | {
    "model.spec.num_layers": 2,
    "model.spec.hidden_size": 64,
    "model.spec.intermediate_size": 128,
    "batch.global_batch": 4,
    "batch.micro_batch": 4,
    "train.steps": 8,
    "train.eval_every": 0,
    "optimizer.lr": 1e-2,
    "schedule.warmup_tokens": 20_000,
}
LONG = COMMON | {
    "stages.1.steps": 3,
    "stages.2.steps": 9,
    "train.eval_every": 3,
    "train.eval_rows": 2,
    "optimizer.lr": 1e-2,
    "schedule.warmup_tokens": 10_000,
}
FAR = "4096-16383"
MARGIN = 0.1


def run(name: str, changes: dict[str, Any], folder: Path) -> Any:
    words = (f"--{key}={value}" for key, value in changes.items())
    return done("train", EXAMPLES / name, *words, f"--output.folder={folder}")


def far_loss(evaluation: dict[str, Any]) -> float:
    return evaluation["loss_by_position"][FAR]


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    run("short_context.toml", SHORT, folder / "out")
    return folder / "out" / "weights"


def test_the_second_example_stretches_what_the_first_one_leaves(short_model: Path) -> None:
    config = json.loads((short_model / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    example = RunConfig.load(EXAMPLES / "long_context.toml", {"model.weights": str(short_model)})
    rope = example.model_spec().rope
    assert rope and (rope.kind, rope.original_max_positions) == ("yarn", 1024)
    longest = example.stage_plan.longest
    assert (longest.number, longest.sequence) == (2, 8192) == (2, 1024 * rope.factor)
    assert 'weights = "../runs/short_context/weights"' in (EXAMPLES / "long_context.toml").read_text()


def test_loss_far_inside_documents_falls(short_model: Path, tmp_path: Path) -> None:
    result = run("long_context.toml", LONG | {"model.weights": short_model}, tmp_path / "out")
    assert far_loss(result["last_evaluation"]) < far_loss(result["first_evaluation"]) - MARGIN
    lines = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["sequence"] for step in steps] == [2048] * 3 + [8192] * 9
    assert steps[-1]["seen_tokens"] == 12 * 8192
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [0, 3, 6, 9, 12]
    assert far_loss(evaluations[0]) == far_loss(result["first_evaluation"])


def test_without_learning_it_does_not_fall(short_model: Path, tmp_path: Path) -> None:
    changes = LONG | {"model.weights": short_model, "optimizer.lr": 1e-9, "stages.2.steps": 1}
    result = run("long_context.toml", changes, tmp_path / "out")
    assert abs(far_loss(result["last_evaluation"]) - far_loss(result["first_evaluation"])) < MARGIN / 10
