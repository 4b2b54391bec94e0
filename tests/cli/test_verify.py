"""`longspan verify` says equal, differs or cannot tell by its exit code."""

from pathlib import Path

import pytest

from longspan.cli import main
from longspan.verify import SABOTAGES
from tests.cli.commands import done, longspan, refused
from tests.verify.runs import RUN, write_run

ALL_AXES = ("--layout.tp", "2", "--layout.cp=2", "--layout.sp")
CHECKS = {
    "loss, float64",
    "evaluation loss, float64",
    "gradients, float64",
    "parameters after 3 steps, float64",
    "loss, float32",
    "evaluation loss, float32",
    "gradients, float32",
    "loss of one process, float32",
    "evaluation loss of one process, float32",
    "gradients of one process, float32",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def test_equal(run: Path) -> None:
    report = done("verify", run, *ALL_AXES, "--layers", "1", "--sequence", "75")
    assert report["passed"]
    assert report["worst_gradient_error"] <= 1e-10
    assert report["loss_error"] <= 1e-12
    assert {check["name"] for check in report["checks"]} == CHECKS
    assert all(check["passed"] and check["error"] <= check["bound"] for check in report["checks"])
    assert report["sabotage"] is None
    assert report["run"].startswith("pp 1 × dp 1 × cp 2 × tp 2, sp on, ")
    assert report["run"].endswith(", 1 layers, 2 rows of 75")
    names = {row["name"] for row in report["parameters"]}
    assert {"embed_tokens.weight", "layers.0.self_attn.q_norm.weight", "lm_head.weight"} <= names
    assert not any(name.startswith("layers.1") for name in names)
    assert all(row["scale"] == pytest.approx(1, abs=1e-8) for row in report["parameters"])


def test_a_later_stage(run: Path, tmp_path: Path) -> None:
    staged = tmp_path / "staged.toml"
    stages = "[[stages]]\nsequence = 60\nsteps = 2\n[[stages]]\nsequence = 90\nsteps = 1\nglobal_batch = 1\n"
    text = (
        RUN.replace("sequence = 121\n", "")
        .replace("steps = 4\n", "")
        .replace('"corpus"', f'"{run.parent}/corpus"')
    )
    staged.write_text(text + stages)
    report = done("verify", staged, "--stage", "2", "--layout.cp", "2", "--layers", "1")
    assert report["passed"]
    assert report["run"].endswith(", 1 layers, 1 rows of 90")
    report = done("verify", staged, "--sequence", "50", "--layers", "1")
    assert report["run"].endswith(", 1 layers, 2 rows of 50")


def test_a_caught_sabotage_differs(run: Path) -> None:
    finished = longspan("verify", run, "--layout.cp", "2", "--sabotage", "average-gradients")
    assert (finished.returncode, finished.stderr) == (1, "")
    rows = {line.split("  ")[0]: line for line in finished.stdout.splitlines()}
    assert rows["loss, float64"].rstrip().endswith("ok")
    assert rows["gradients, float64"].rstrip().endswith("DIFFERS")
    assert "sabotage: average-gradients" in finished.stdout
    assert "0.500000000000" in finished.stdout
    assert finished.stdout.rstrip().endswith("caught")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--sabotage skip-cp-sum",
            "this run cannot show 'skip-cp-sum': dp × cp is 1: there is nothing to sum",
        ),
        ("--sabotage gremlins", "unknown sabotage 'gremlins'; use one of drop-bounds, "),
        ("--layers 0", "layers=0 must be from 1 to the model's 2"),
        ("--stage 2", "stage=2 must be from 1 to the run's 1"),
        ("--sequence 1", "data.sequence = 1: should be greater than or equal to 2"),
        ("--layout.tpp 2", "unknown key layout.tpp = 2; did you mean layout.tp?"),
        ("--layout.pp 2", "training with pp=2 is not supported; use pp=1"),
        ("--data.source nowhere", "nowhere' does not exist"),
    ],
)
def test_what_cannot_be_told(run: Path, capsys: pytest.CaptureFixture[str], words: str, line: str) -> None:
    assert line in refused(capsys, "verify", run, *words.split(), "--train.threads", "1")


def test_sabotages_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--sabotage", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{sabotage.name} " in listed and sabotage.fault in listed for sabotage in SABOTAGES.values())
