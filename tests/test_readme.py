"""What README and docs show is what happens: run files load, and the output of quick commands is theirs."""

import re
import shlex
from itertools import zip_longest
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.model import InitialWeights, save_hf
from longspan.spec.run import RunConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "running.md"]
QUICK = ("groups", "explain")
CUT = "⋮"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_run_files_load(page: Path, tmp_path: Path) -> None:
    demo = RunConfig.load(ROOT / "examples" / "demo.toml").model_spec()
    save_hf(tmp_path / "weights", demo, InitialWeights(demo, 0).items())
    found = blocks(page, "toml")
    assert found
    for number, text in enumerate(found):
        run = tmp_path / f"{number}.toml"
        run.write_text(re.sub(r'weights = "[^"]*"', 'weights = "weights"', text))
        RunConfig.load(run)


def shown(page: Path) -> list[tuple[str, str]]:
    """Quick commands of a page with the output that it shows, up to where it is cut."""
    commands = [part.partition("\n") for block in blocks(page, "console") for part in block.split("$ ")[1:]]
    return [
        (words, output.partition(f"{CUT}\n")[0])
        for words, _, output in commands
        if words.startswith("longspan ") and words.split()[1] in QUICK
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quick_commands_print_what_is_shown(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for words, expected in shown(page):
        assert main(shlex.split(words)[1:]) == 0
        printed = capsys.readouterr().out.splitlines()[: len(expected.splitlines())]
        for line, wanted in zip_longest(printed, expected.splitlines(), fillvalue="nothing"):
            assert line.rstrip() == wanted


def test_the_readme_shows_a_quick_command() -> None:
    assert [words for words, _ in shown(ROOT / "README.md")] == ["longspan groups --world 8 --tp 4 --cp 2"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verbs = set(re.findall(r"longspan (explain \w+|[a-z]+) ", " ".join(blocks(page, "sh"))))
    assert verbs
    for verb in verbs:
        assert main([*verb.split(), "--help"]) == 0
    capsys.readouterr()
