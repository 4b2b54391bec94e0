"""`longspan demo` trains, proves and says where things are."""

from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.train.loop import TrainResult
from longspan.verify import Check, Report
from tests.cli.commands import done
from tests.verify.runs import write_run

ROOT = Path(__file__).parents[2]
TINY = {
    "model.spec.num_layers": 1,
    "model.spec.hidden_size": 32,
    "model.spec.intermediate_size": 48,
    "model.spec.num_heads": 4,
    "model.spec.num_kv_heads": 2,
    "data.sequence": 96,
    "data.eval_documents": 0.3,
    "train.steps": 3,
}


def test_a_tiny_demo(tmp_path: Path) -> None:
    write_run(tmp_path)
    changes = TINY | {"data.source": tmp_path / "corpus", "output.folder": tmp_path / "out"}
    result = done("demo", *(f"--{key}={value}" for key, value in changes.items()))
    assert result["last_loss"] < result["first_loss"]
    assert result["verified"]
    assert result["seconds"] > 0
    assert (tmp_path / "out" / "steps.jsonl").is_file()
    assert (tmp_path / "out" / "weights" / "model.safetensors").is_file()


@pytest.mark.parametrize(("error", "code"), [(1e-13, 0), (1e-3, 1)], ids=["equal", "differs"])
def test_words_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float, code: int
) -> None:
    report = Report("a run", (Check("gradients, float64", error, 1e-10),), (), None)
    seen = []

    def trained(config, quiet):
        seen.append((config.layout.tp, config.layout.cp, config.layout.sp, config.data.sequence, quiet))
        return TrainResult(5.5, 2.5, 2.6, 1e3, 10**6, 60.0, "checkpoint", 3.25)

    def verified(config):
        seen.append((config.layout.tp, config.layout.cp, config.layout.sp, config.data.sequence))
        return report

    # The package's own `demo` is the verb, not this module.
    demo = import_module("longspan.cli.demo")
    monkeypatch.setattr(demo, "trained", trained)
    monkeypatch.setattr(demo, "verified", verified)
    assert main(["demo"]) == code
    assert seen == [(2, 2, True, 4096, False), (2, 2, True, 1024)]
    printed = capsys.readouterr()
    assert printed.out == ""
    for words in (
        "loss fell from 5.500 to 2.500",
        "would have 3.250",
        "steps.jsonl",
        "tensorboard --logdir",
        "weights",
    ):
        assert words in printed.err
    assert ("DIFFERS" in printed.err) == bool(code)


def test_the_example_is_what_the_demo_runs() -> None:
    shipped = (files("longspan.cli") / "demo.toml").read_text()
    assert (ROOT / "examples" / "demo.toml").read_text() == shipped
