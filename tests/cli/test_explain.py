"""`longspan explain` says what a run file means."""

import json
from pathlib import Path

import pytest

from longspan.cli import main
from tests.cli.test_cli import RUN


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(RUN + "[layout]\ncp = 2\ntp = 4\nsp = true\n")
    return str(tmp_path / "run.toml")


def test_layout_for_people(capsys: pytest.CaptureFixture[str], run_file: str) -> None:
    assert main(["explain", "layout", run_file]) == 0
    text = capsys.readouterr().out
    rows = {row.split()[0]: row for row in text.splitlines() if row.strip()}
    assert "1/2 cp" in rows["self_attn.q_proj"] and "rows 1/4 of 64×64" in rows["self_attn.q_proj"]
    assert "1/8 cp·sp" in rows["self_attn.o_proj"] and "columns 1/4" in rows["self_attn.o_proj"]
    assert "1/8 cp·sp" in rows["input_layernorm"] and "cp × tp" in rows["input_layernorm"]
    assert "whole 32×64" in rows["self_attn.k_proj"] and "cp × tp" in rows["self_attn.k_proj"]
    assert "cp and sp are different things" in text
    assert "tp=4 exceeds the 2 key/value heads" in text


def test_layout_for_programs_and_overrides(capsys: pytest.CaptureFixture[str], run_file: str) -> None:
    words = [run_file, "--json", "--layout.tp", "2", "--data.sequence=33", "--layout.sp"]
    assert main(["explain", "layout", *words]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert captured.err == ""
    assert (value["layout"]["tp"], value["layout"]["cp_inner"]) == (2, 2)
    by_name = {module["module"]: module for module in value["modules"]}
    assert by_name["layers.*.self_attn.q_proj"]["input_tokens"] == ["cp"]
    assert by_name["norm"]["input_tokens"] == ["cp", "tp"]
    assert "at most 17 of 33 tokens" in value["notes"][0]
    assert "at most 9 tokens" in value["notes"][0]


def test_a_wrong_override_names_the_nearest_key(capsys: pytest.CaptureFixture[str], run_file: str) -> None:
    assert main(["explain", "layout", run_file, "--layout.tpp", "2"]) == 2
    assert capsys.readouterr().err == (
        "longspan: command line: unknown key layout.tpp = 2; did you mean layout.tp?\n"
    )


def test_config_lists_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "config", "train"]) == 0
    printed = capsys.readouterr().out
    rows = {row.split()[0]: row for row in printed.splitlines() if row.strip()}
    assert "float32 | bfloat16 | float64" in rows["train.dtype"]
    assert "Optimizer steps; 100 when left out." in rows["train.steps"]
    assert "[[stages]]" in printed
    assert main(["explain", "config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout.cp"]["type"] == "integer"
