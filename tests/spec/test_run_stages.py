"""[[stages]] in a run file: what they say, what they may not, and how the command line reaches them."""

from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError
from longspan.spec.run import RunConfig
from tests.spec.test_run import SPEC, load, refusal

STAGES = """
[[stages]]
sequence = 64
steps = 3
[[stages]]
sequence = 256
steps = 2
global_batch = 6
micro_batch = 3
"""


def sizes(config: RunConfig) -> list[tuple[int, int, int, int]]:
    return [
        (stage.sequence, stage.steps, stage.batch.global_batch, stage.batch.micro_batch)
        for stage in config.stage_plan.stages
    ]


def test_a_run_without_stages_is_one_stage(tmp_path: Path) -> None:
    assert sizes(load(tmp_path)) == [(4096, 100, 4, 1)]
    text = "[data]\nsequence = 8\n[train]\nsteps = 5\n[batch]\nglobal_batch = 2\nmicro_batch = 2"
    assert sizes(load(tmp_path, text)) == [(8, 5, 2, 2)]


def test_stages_take_their_batch_from_the_run_or_say_their_own(tmp_path: Path) -> None:
    config = load(tmp_path, STAGES + "[batch]\nglobal_batch = 2")
    assert sizes(config) == [(64, 3, 2, 1), (256, 2, 6, 3)]
    assert config.stage_plan.total_tokens == 3 * 2 * 64 + 2 * 6 * 256
    assert config.eval_sequence == 256
    assert load(tmp_path, STAGES + "[train]\neval_sequence = 99").eval_sequence == 99


@pytest.mark.parametrize("text", [STAGES, STAGES + "[train]\neval_sequence = 99\n[layout]\ntp = 2"])
def test_a_dumped_run_loads_as_the_same_value(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    assert load(tmp_path, config.dump(), model="") == config


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[train]\nsteps = 4",
            "/run.toml: train.steps=4 and [[stages]] both say the steps; leave train.steps out",
        ),
        (
            "[data]\nsequence = 4096",
            "/run.toml: data.sequence=4096 and [[stages]] both say the sequence; leave data.sequence out",
        ),
        (
            "[layout]\ndp = 2",
            "/run.toml: stage 1: global_batch=1 is not a multiple of micro_batch=1 × dp=2; use global_batch=2",
        ),
        (
            "[layout]\ncp = 65",
            "/run.toml: stage 1: sequence=64 leaves some of cp × tp = 65 ranks without tokens; use 65 or more",
        ),
        (
            "[layout]\ncp = 4\n[train]\neval_sequence = 3",
            "/run.toml: rows of 3 tokens leave some of cp × tp = 4 ranks without tokens in evaluation; set "
            "train.eval_sequence to 4 or more",
        ),
        (
            "[[stages]]\nsequence = 1\nsteps = 1",
            "/run.toml: stages.3.sequence = 1: should be greater than or equal to 2",
        ),
        ("[[stages]]\nsequence = 8", "/run.toml: stages.3.steps is missing"),
        (
            "[[stages]]\nsequence = 8\nstep = 1\nsteps = 1",
            "/run.toml: unknown key stages.3.step = 1; did you mean stages.3.steps?",
        ),
    ],
    ids=repr,
)
def test_what_is_wrong_is_said_with_the_number_of_its_stage(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, STAGES + text, {"batch.global_batch": 1}) == line


def test_a_later_stage_is_named_too(tmp_path: Path) -> None:
    stages = STAGES.replace("global_batch = 6", "global_batch = 4")
    assert refusal(tmp_path, stages).startswith(
        "/run.toml: stage 2: global_batch=4 is not a multiple of micro_"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stages = 5", "/run.toml: stages = 5: should be a list"),
        ("stages = [5]", "/run.toml: stages.1 = 5: should be a table"),
    ],
)
def test_stages_are_tables(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, model=text + SPEC) == line


def test_the_command_line_reaches_single_stages(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"stages.2.steps": 9, "stages.1.sequence": 32}
    assert [stage[:2] for stage in sizes(load(tmp_path, STAGES, changes))] == [(32, 3), (256, 9)]
    replaced = load(tmp_path, STAGES, {"stages": [{"sequence": 16, "steps": 1}]})
    assert sizes(replaced) == [(16, 1, 4, 1)]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"stages.3.steps": 1},
            "/run.toml: stages.3: the run has 2 stages; write the number of one of them, as ",
        ),
        (
            {"stages.steps": 1},
            "/run.toml: stages.steps: the run has 2 stages; write the number of one of them, ",
        ),
        ({"stages.2.steps": 0}, "command line: stages.2.steps = 0: should be greater than 0"),
        ({"stages.2.stepz": 1}, "command line: unknown key stages.2.stepz = 1; did you mean stages.2.steps?"),
        ({"stages": [{"sequence": 8}]}, "command line: stages.1.steps is missing"),
        ({"train.steps": 4}, "/run.toml: train.steps=4 and [[stages]] both say the steps"),
    ],
    ids=repr,
)
def test_wrong_overrides_of_stages(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    assert refusal(tmp_path, STAGES, changes).startswith(line)


def test_one_stage_is_a_run_of_its_own(tmp_path: Path) -> None:
    config = load(tmp_path, STAGES + "[train]\neval_sequence = 99")
    assert sizes(config.one_stage(2)) == [(256, 2, 6, 3)]
    assert config.one_stage(2).eval_sequence == 99
    assert sizes(config.one_stage(1, 33)) == [(33, 3, 4, 1)]
    assert config.one_stage(1, 33).eval_sequence == 33
    assert load(tmp_path, STAGES).one_stage(1).eval_sequence == 64
    assert config.one_stage(2).model_spec() == config.model_spec()
    for number in (0, 3):
        with pytest.raises(ConfigError, match=f"^stage={number} must be from 1 to the run's 2$"):
            config.one_stage(number)
    with pytest.raises(ConfigError, match="command line: data.sequence = 1: should be greater than"):
        config.one_stage(1, 1)
