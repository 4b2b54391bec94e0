"""The run files in examples/ mean what they say; the demo and the two for long context have tests of their own."""

from pathlib import Path

import pytest

from longspan.model import InitialWeights, save_hf
from longspan.spec.run import RunConfig
from longspan.train.session import check_trainable
from tests.verify.runs import write_run
from tests.verify.test_verify import verdict

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "model.spec.hidden_size": 32,
    "model.spec.intermediate_size": 48,
    "model.spec.head_dim": 8,
    "model.spec.num_layers": 2,
    "model.spec.windows": [40, 0],
    "data.sequence": 150,
    "data.eval_documents": 0.3,
}


@pytest.fixture
def demo_weights(tmp_path: Path) -> Path:
    """A folder such as the demo leaves behind."""
    spec = RunConfig.load(EXAMPLES / "demo.toml").model_spec()
    save_hf(tmp_path / "weights", spec, InitialWeights(spec, 0).items())
    return tmp_path / "weights"


def test_every_example_can_be_trained(demo_weights: Path) -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.toml"))
    assert names == ["demo.toml", "hf_start.toml", "long_context.toml", "short_context.toml", "windowed.toml"]
    for name in names:
        goes_on = name in ("hf_start.toml", "long_context.toml")
        changes = {"model.weights": str(demo_weights)} if goes_on else {}
        check_trainable(RunConfig.load(EXAMPLES / name, changes))


def test_hf_start_stretches_the_demo_four_times(demo_weights: Path) -> None:
    config = RunConfig.load(EXAMPLES / "hf_start.toml", {"model.weights": str(demo_weights)})
    before, after = RunConfig.load(EXAMPLES / "demo.toml").model_spec(), config.model_spec()
    assert before.rope and after.rope
    assert (after.rope.kind, after.rope.factor, after.rope.theta) == ("yarn", 4.0, before.rope.theta)
    assert after.rope.original_max_positions == before.max_positions
    assert config.data.sequence == 4 * before.max_positions
    assert after.with_changes(rope=before.rope) == before


def test_windowed_equals_one_process_when_shrunk(tmp_path: Path) -> None:
    config = RunConfig.load(EXAMPLES / "windowed.toml")
    assert config.layout.cp == 4
    assert config.model_spec().window_layers == {512: 3, None: 1}
    write_run(tmp_path)
    small = SMALL | {"data.source": str(tmp_path / "corpus")}
    report = verdict(EXAMPLES / "windowed.toml", {}, None, **small)
    assert report["passed"], report["checks"]
    assert "cp 4" in report["run"]
    assert not verdict(EXAMPLES / "windowed.toml", {}, "drop-window", **small)["passed"]
