"""One line for every error, and no torch where none is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from longspan import __version__
from longspan.cli import main

RUN = """
[model.spec]
num_layers = 2
hidden_size = 64
intermediate_size = 128
num_heads = 4
num_kv_heads = 2
vocab_size = 257
"""
# Every command that must answer at once.
LIGHT = """
import sys
from longspan.cli import main
for words in ("--help", "groups --world 4 --tp 2", f"explain layout {sys.argv[1]}", "explain config"):
    assert main(words.split()) == 0, words
print([name for name in ("torch", "transformers", "pyarrow") if name in sys.modules], file=sys.stderr)
"""


def test_help_and_explanations_load_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, tmp_path / "run.toml"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "longspan", "groups", "--tp", "0"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "longspan: tp must be at least 1, got 0\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main([]) == 0
    assert "groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("grops", 'longspan: Unknown command "grops". Did you mean "groups"?'),
        ("groups --tpp 4", "longspan: Unknown option: --tpp. Did you mean --tp?"),
        ("groups --tp x", 'longspan: Invalid value for --tp: unable to convert "x" into int.'),
        (
            "groups --world 8 --tp 3",
            "longspan: tp=3 needs a multiple of 3 ranks, not a world of 8; tp=1, 2, 4 or 8",
        ),
        (
            "groups --world 8 --tp 2 --dp 2",
            "longspan: pp=1 × dp=2 × cp=1 × tp=2 makes 4 ranks, not the world of 8;",
        ),
        ("groups --sp", "longspan: sp shares tokens out over tp, but tp=1;"),
        ("explain layout", 'longspan: Command "explain layout" parameter RUN requires an argument.'),
        (
            "explain layout missing.toml",
            "longspan: missing.toml: cannot read the run file: No such file or directory",
        ),
        ("explain layout missing.toml 4", "longspan: '4' has no key before it;"),
        ("explain config lay", "longspan: no section 'lay'; use one of model, layout,"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1
