"""`longspan train` as a person runs it: alone, on ranks that it starts, under torchrun, and with wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from longspan.model import load_hf
from longspan.spec.run import RunConfig
from longspan.train.groups import Groups
from longspan.train.session import Session
from tests.cli.commands import done, longspan, one_line, refused
from tests.model.families import CONFIGS, hf_logits, hf_model
from tests.verify.runs import RUN, write_run

ALL_AXES = ("--layout.tp", "2", "--layout.cp=2", "--layout.sp")
# The test process keeps its one thread.
ONE_THREAD = ("--train.threads", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def logits(folder: Path) -> torch.Tensor:
    """What transformers computes from a folder of weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return hf_logits(model, torch.arange(40))


def test_one_two_and_four_processes_train_the_same_model(run: Path, tmp_path: Path) -> None:
    alone = done("train", run, "--output.folder", tmp_path / "alone")
    started = done("train", run, *ALL_AXES, "--output.folder", tmp_path / "started")
    launched = done("train", run, *ALL_AXES, "--output.folder", tmp_path / "launched", ranks=4)
    for result in (alone, started, launched):
        assert result["tokens_per_s"] > 0
        assert result["peak_bytes"] > 0
        assert result["last_loss"] < result["first_loss"]
    for field in ("first_loss", "last_loss", "eval_loss"):
        assert started[field] == pytest.approx(alone[field], abs=1e-4)
        assert launched[field] == started[field]
    assert launched["peak_bytes"] < alone["peak_bytes"]

    head, *steps = records(tmp_path / "launched")
    assert head["kind"] == "run"
    kinds = ["evaluation", "step", "step", "evaluation", "step", "step", "evaluation"]
    assert [step["kind"] for step in steps] == kinds
    assert [step["step"] for step in steps] == [0, 1, 2, 2, 3, 4, 4]
    assert steps[-2]["loss"] == launched["last_loss"]
    assert steps[0]["loss"] == launched["first_evaluation"]["loss"]
    assert steps[-1]["loss"] == launched["last_evaluation"]["loss"] == launched["eval_loss"]
    assert launched["last_evaluation"]["loss"] < launched["first_evaluation"]["loss"]
    for record in (head, *steps):
        assert (record["cp"], record["tp"], record["sp"], record["dtype"]) == (2, 2, True, "float32")
    assert head["config"]["layout"]["cp_inner"] == 2
    assert head["config"]["model"]["spec"]["windows"] == [0, 24]
    assert head["versions"]["torch"] == torch.__version__
    assert not records(tmp_path / "alone")[0]["sp"]

    trained = [logits(tmp_path / name / "weights") for name in ("alone", "started", "launched")]
    assert trained[0].isfinite().all()
    torch.testing.assert_close(trained[0], trained[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(trained[1], trained[2], atol=0, rtol=0)


def test_words_for_people(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    finished = longspan("train", run, "--output.folder", folder, "--output.tensorboard", "true")
    assert finished.returncode == 0
    assert finished.stdout.startswith("loss 5.")
    assert str(folder) in finished.stdout.replace("\n", "")
    opening, _, table = finished.stderr.partition("  step ")
    for words in ("1 rank = pp 1", "cp is 1: nothing is shared", "cpu_flash", "24 documents", "234 targets"):
        assert words in opening
    shown = [line.split()[0] for line in table.splitlines()[1:]]
    assert shown == ["0", "1", "2", "2", "3", "4", "4"]
    assert table.count(" held out; by position 0-255 ") == 3
    assert [*(folder / "tensorboard").iterdir()]


def write_hf_run(folder: Path) -> dict[str, Any]:
    """A run that starts from a random Hugging Face model and stretches its RoPE; the model's own config."""
    config = CONFIGS["llama2"] | {"vocab_size": 257}
    hf_model(config).save_pretrained(folder / "start")
    write_run(folder)
    data = RUN[RUN.index("[data]") :]
    start = '[model]\nweights = "start"\n[model.rope]\nkind = "yarn"\nfactor = 4.0\n'
    (folder / "run.toml").write_text(start + data)
    return config


def definition_loss(session: Session, model: torch.nn.Module) -> float:
    """Loss of the run's first step by transformers, every document run alone."""
    batches = session.training_step(0)
    total = 0.0
    for whole in (micro.whole for micro in batches.micro_batches):
        bounds = whole.cu_seqlens.tolist()
        for start, stop in zip(bounds, bounds[1:], strict=False):
            tokens_T = torch.from_numpy(whole.tokens_T[start:stop].copy())
            predicted = hf_logits(model, tokens_T)[:-1]
            total += float(torch.nn.functional.cross_entropy(predicted, tokens_T[1:], reduction="sum"))
    return total / batches.num_targets


def test_a_hugging_face_model_with_another_rope(tmp_path: Path) -> None:
    config = write_hf_run(tmp_path)
    steps = ("--train.steps", "1", "--optimizer.lr", "1e-12", "--train.eval_every", "0")
    result = done("train", tmp_path / "run.toml", *steps)

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    stretched = AutoConfig.for_model(**config | {"rope_scaling": yarn})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "start", config=stretched, attn_implementation="eager"
    ).eval()
    session = Session.open(RunConfig.load(tmp_path / "run.toml"), Groups.alone())
    assert result["first_loss"] == pytest.approx(definition_loss(session, model), rel=1e-5)

    weights = tmp_path / "out" / "weights"
    torch.testing.assert_close(logits(weights), hf_logits(model, torch.arange(40)), atol=1e-5, rtol=1e-5)
    assert load_hf(weights).spec.rope.kind == "yarn"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # All ranks see it at once.
        (("--optimizer.lr", "1e30"), "step 2: loss "),
        # Rank 0 sees it and tells the other one.
        (("--output.folder", "run.toml/out"), "preparing "),
    ],
    ids=["all", "one"],
)
def test_a_rank_that_fails_ends_the_run_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], line: str
) -> None:
    monkeypatch.chdir(run.parent)
    finished = longspan("train", run, "--layout.cp", "2", *words, "--json")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert one_line(finished.stderr).startswith(line)
    assert not (run.parent / "out" / "weights").exists()


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_interrupted_run_ends_without_a_word(run: Path, tmp_path: Path, ranks: str) -> None:
    words = ("--layout.cp", ranks, "--train.steps", "1000000", "--output.folder", tmp_path, "--json")
    finished = longspan("train", run, *words, interrupt_at=tmp_path / "steps.jsonl")
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "")


def test_the_world_of_torchrun_must_fit(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert refused(capsys, "train", run, *ALL_AXES) == (
        "pp=1 × dp=1 × cp=2 × tp=2 makes 4 ranks, not the world of 2; cp=1 or tp=1 would fit"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--layout.tpp 2", "command line: unknown key layout.tpp = 2; did you mean layout.tp?"),
        ("--optimiser.lr 1", "command line: unknown key optimiser = {'lr': 1}; did you mean [optimizer]?"),
        (
            "--layout.tp 3",
            "tp=3 cannot deal out 4 query heads and 2 key/value heads: it must divide the first",
        ),
        ("--batch.global_batch 3 --layout.dp 2", "global_batch=3 is not a multiple of micro_batch=1 × dp=2;"),
        ("--layout.sp", "sp shares tokens out over tp, but tp=1;"),
        ("--layout.pp 2", "training with pp=2 is not supported; use pp=1"),
        (
            "--layout.fsdp true",
            "fsdp shares weights out over dp_shard × cp, but both are 1; set dp_shard or cp",
        ),
        ("--data.source nowhere", "nowhere' does not exist; give a file, a folder"),
        ("--data.source empty", "empty' has no files; give a file, a folder"),
        ("--data.source blank", "blank' has no documents (1 empty and 0 undecodable ones were skipped);"),
        ("--data.source binary.txt", "binary.txt:1: invalid UTF-8"),
        ("--data.tokenizer binary.txt", "binary.txt: not a tokenizer.json"),
        ("--data.tokenizer nowhere.json", "nowhere.json' does not exist; give a tokenizer.json or 'bytes'"),
        ("--data.tokenizer large.json", "large.json' (vocabulary 300) gives id 299 to a model with a vocab"),
        ("--model.spec.vocab_size 100", "'bytes' (vocabulary 257) gives id 256 to a model with a vocabulary"),
        ("--model.spec.rope.kind dynamic --model.spec.rope.factor 2.0", "dynamic RoPE (its angles depend on"),
        ("--train.dtype float8", "train.dtype = 'float8'"),
        ("--optimizer.lr nan", "optimizer.lr = nan: should be a finite number"),
        ("--data.eval_documents 0", "there are no documents to evaluate on; raise data.eval_documents"),
    ],
)
def test_wrong_values_are_refused_before_any_rank_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    for folder in ("empty", "blank"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blank" / "nothing.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    # It knows only the word of the highest number.
    vocabulary = {f"word{number}": number for number in range(299)} | {"document": 299}
    Tokenizer(WordLevel(vocabulary, unk_token="document")).save("large.json")
    assert line in refused(capsys, "train", run, *words.split(), *ONE_THREAD)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM"),
        (
            {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4},
            "cannot train this gpt2 model, only price it: it has LayerNorm, a GELU MLP, learned positions",
        ),
        ({}, "config.json has no model_type; give a config.json as transformers writes it"),
    ],
    ids=["bert", "gpt2", "nothing"],
)
def test_models_that_cannot_be_trained_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], line: str
) -> None:
    write_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = tmp_path / "hf.toml"
    run.write_text('[model]\nconfig = "config.json"\n' + RUN[RUN.index("[data]") :])
    assert line in refused(capsys, "train", run)


def test_a_misspelt_key_of_the_file_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    run.write_text(RUN.replace("eval_rows", "evalrows"))
    assert refused(capsys, "train", run) == (
        f"{run}: unknown key train.evalrows = 3; did you mean train.eval_rows?"
    )
    run.write_text("[model")
    assert refused(capsys, "train", run).startswith(f"{run}: not a TOML file: ")
