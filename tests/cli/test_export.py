"""A checkpoint of any layout becomes a folder that transformers loads, with the logits that the run had."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig

from tests.cli.commands import done, refused
from tests.cli.test_train import logits
from tests.verify.runs import write_run


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run over tp and cp with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("run")
    vocabulary = {"document": 1, "unknown": 0} | {str(number): 2 + number for number in range(24)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="unknown"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    run = write_run(folder)
    words = ("--layout.tp", "2", "--layout.cp", "2", "--train.steps", "2", "--data.sequence", "9")
    changes = ("--data.tokenizer", folder / "tokenizer.json", "--train.eval_every", "0")
    done("train", run, *words, *changes)
    return folder / "out"


def checkpoint(output: Path) -> Path:
    return output / "checkpoints" / "step-00000002"


def test_the_logits_are_the_runs(output: Path, tmp_path: Path) -> None:
    result = done("export", checkpoint(output), tmp_path / "hf")
    assert result == {
        "step": 2,
        "dtype": "float32",
        "num_parameters": 32_000,
        "tokenizer": str(output.parent / "tokenizer.json"),
        "folder": str(tmp_path / "hf"),
    }
    torch.testing.assert_close(logits(tmp_path / "hf"), logits(output / "weights"), atol=0, rtol=0)
    copied = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert copied.encode("document").ids == [1]


def test_in_another_dtype(output: Path, tmp_path: Path) -> None:
    done("export", checkpoint(output), tmp_path / "hf", "--dtype", "bfloat16")
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    narrow, wide = logits(tmp_path / "hf").float(), logits(output / "weights")
    assert not torch.equal(narrow, wide)
    torch.testing.assert_close(narrow, wide, atol=0.05, rtol=0.05)


def test_what_cannot_be_exported_is_one_line(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert refused(capsys, "export", checkpoint(output), tmp_path / "full") == (
        f"{tmp_path / 'full'} is not empty; give a new folder"
    )
    assert "is no complete checkpoint: it has no manifest.json" in refused(
        capsys, "export", output, tmp_path / "hf"
    )
    moved = tmp_path / "step-00000002"
    moved.mkdir()
    for file in checkpoint(output).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert "add --trust-checkpoint if you know where it comes from" in refused(
        capsys, "export", moved, tmp_path / "hf"
    )
    assert done("export", moved, tmp_path / "hf", "--trust-checkpoint")["step"] == 2
    (moved / "__1_0.distcp").unlink()
    assert refused(capsys, "export", moved, tmp_path / "again", "--trust-checkpoint") == (
        f"{moved / '__1_0.distcp'} is missing; there is no earlier one beside it"
    )
    assert not (tmp_path / "again").exists()
