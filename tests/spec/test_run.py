"""A run file becomes one value, or one line that says what is wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError, LongspanError, UnsupportedError
from longspan.spec.layout import Layout
from longspan.spec.run import RunConfig, known_keys
from longspan.spec.run_tables import PATH_KEYS

SPEC = """
[model.spec]
num_layers = 2
hidden_size = 64
intermediate_size = 128
num_heads = 4
num_kv_heads = 2
vocab_size = 257
"""
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 128,
}


def load(
    folder: Path, text: str = "", overrides: dict[str, Any] | None = None, model: str = SPEC
) -> RunConfig:
    (folder / "run.toml").write_text(model + text)
    return RunConfig.load(folder / "run.toml", overrides)


def refusal(folder: Path, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(LongspanError) as raised:
        load(folder, *args, **kwargs)
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(str(folder), "")


def test_a_model_is_all_that_a_run_must_say(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.layout == Layout()
    assert config.stage_plan.stages[0].batch.num_microbatches == 4
    assert config.stage_plan.total_tokens == 100 * 4 * 4096
    assert config.output.folder == Path("runs/run").resolve()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "windows = [8, 0]",
        "windows = 8",
        "[model.rope]\nkind = 'yarn'\nfactor = 4",
        "[layout]\ncp = 4\ncp_outer = 2\ntp = 2\nsp = true\nranks_per_node = 4",
        "[data]\nsource = ['docs', '/data']\ntokenizer = 'tokenizer.json'\nsequence = 33",
        "[schedule]\nkind = 'wsd'\ndecay_tokens = 1_000_000",
        "[optimizer]\nlr = 1\nclip_norm = 0",
    ],
    ids=repr,
)
def test_a_dumped_run_loads_as_the_same_value_from_any_folder(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert load(elsewhere, config.dump(), model="") == config


def test_paths_in_the_file_are_relative_to_it_and_others_to_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    text = "[data]\nsource = 'docs'\ntokenizer = 'bytes'\n[output]\nfolder = '../out'"
    config = load(tmp_path, text)
    assert (config.data.source, config.data.tokenizer) == ((tmp_path / "docs",), "bytes")
    assert config.output.folder == tmp_path.parent / "out"
    assert load(tmp_path, text, {"data.source": "docs"}).data.source == (here / "docs",)


def test_every_path_of_a_run_is_known_to_be_one() -> None:
    described = {key for key, leaf in known_keys().items() if _holds_a_path(key)}
    assert described == set(PATH_KEYS)


def _holds_a_path(key: str) -> bool:
    section, _, name = key.rpartition(".")
    field = RunConfig.model_fields.get(section)
    sizes: Any = getattr(field, "annotation", None)
    return "Path" in repr(getattr(sizes, "model_fields", {}).get(name))


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    text = "[layout]\ncp_outer = 2\ncp_inner = 2\n[train]\nsteps = 5"
    config = load(tmp_path, text, {"layout.cp": 3, "model.spec.num_layers": 4, "train.seed": 1})
    assert (config.layout.cp_outer, config.layout.cp_inner) == (1, 3)
    assert (config.train.steps, config.train.seed, config.model_spec().num_layers) == (5, 1, 4)
    assert load(tmp_path, "[layout]\ncp = 2", {"layout.cp_outer": 3}).layout.cp == 6


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[layout]\ntpp = 4", "/run.toml: unknown key layout.tpp = 4; did you mean layout.tp?"),
        ("[layot]\ntp = 4", "/run.toml: unknown key layot = {'tp': 4}; did you mean [layout]?"),
        ("[train]\nlr = 4", "/run.toml: unknown key train.lr = 4; did you mean optimizer.lr?"),
        ("heads = 4", "/run.toml: unknown key model.spec.heads = 4; did you mean model.spec.num_heads?"),
        (
            "[model.rope]\nfactr = 4",
            "/run.toml: unknown key model.rope.factr = 4; did you mean model.rope.factor?",
        ),
        ("[layout]\ntp = 'two'", "/run.toml: layout.tp = 'two': should be a valid integer"),
        ("[layout]\ntp = true", "/run.toml: layout.tp = True: should be a valid integer"),
        ("[data]\nsequence = 4096.0", "/run.toml: data.sequence = 4096.0: should be a valid integer"),
        ("[data]\nsequence = 1", "/run.toml: data.sequence = 1: should be greater than or equal to 2"),
        ("[data]\nsource = 5", "/run.toml: data.source = 5: should be 'stdlib', a path or a list of paths"),
        ("[data]\nsource = []", "/run.toml: data.source = []: should be 'stdlib', a path or a list of paths"),
        ("[output]\nfolder = ''", "/run.toml: output.folder = '': should be a path"),
        ("[train]\nsteps = -1", "/run.toml: train.steps = -1: should be greater than 0"),
        (
            "[train]\ndtype = 'fp16'",
            "/run.toml: train.dtype = 'fp16': should be 'float32', 'bfloat16' or 'float64'",
        ),
        ("[layout]\ntp = 0", "/run.toml: tp must be at least 1, got 0"),
        (
            "[layout]\nsp = true",
            "/run.toml: sp shares tokens out over tp, but tp=1; set tp to 2 or more, or sp=false",
        ),
        (
            "[layout]\ndp = 3",
            "/run.toml: global_batch=4 is not a multiple of micro_batch=1 × dp=3; use global_batch=3 or 6",
        ),
        (
            "[layout]\ncp = 8\n[data]\nsequence = 6",
            "/run.toml: sequence=6 leaves some of cp × tp = 8 ranks without tokens; use 8 or more",
        ),
        (
            "[layout]\ntp = 3",
            "/run.toml: tp=3 cannot deal out 4 query heads and 2 key/value heads: it must divide the first, "
            "and divide or be a multiple of the second; use tp=1, 2 or 4",
        ),
        ("[model.rope]\nkind = 'yarn'", "/run.toml: rope kind 'yarn' needs factor"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text) == line


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("layout.tpp", 2, "command line: unknown key layout.tpp = 2; did you mean layout.tp?"),
        ("layot.tp", 2, "command line: unknown key layot = {'tp': 2}; did you mean [layout]?"),
        ("stepz", 2, "command line: unknown key stepz = 2; did you mean stages.steps or train.steps?"),
        ("layout", 2, "command line: layout = 2: should be a table"),
        ("train", 2, "command line: train = 2: should be a table"),
        ("train.steps", "x", "command line: train.steps = 'x': should be a valid integer"),
        ("train.steps.x", 2, "command line: train.steps = {'x': 2}: should be a valid integer"),
    ],
)
def test_a_wrong_override_is_not_blamed_on_the_file(tmp_path: Path, key: str, value: Any, line: str) -> None:
    assert refusal(tmp_path, overrides={key: value}) == line


def test_bad_syntax_is_placed(tmp_path: Path) -> None:
    assert re.match(r"/run.toml: not a TOML file: .*line 9", refusal(tmp_path, "[layout\ntp = 2"))


def test_an_unknown_key_with_nothing_near_lists_what_there_is(tmp_path: Path) -> None:
    assert "[memory] knows recompute" in refusal(tmp_path, "[memory]\nqqqq = 1")
    assert "sections are model, model.spec, " in refusal(tmp_path, "[qqqq]\nx = 1")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("", "/run.toml: model is missing"),
        ("[model]", "/run.toml: [model] needs exactly one of config, weights and spec, got none"),
        (
            "[model]\nconfig = 'a'\nweights = 'b'",
            "/run.toml: [model] needs exactly one of config, weights and spec, got config and weights",
        ),
        ("[model.spec]\nnum_layers = 2", "/run.toml: model.spec.hidden_size is missing"),
    ],
    ids=repr,
)
def test_a_run_has_one_model(tmp_path: Path, model: str, line: str) -> None:
    assert refusal(tmp_path, model=model) == line


@pytest.mark.parametrize("name", ["missing.toml", "folder", "binary.toml"])
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff = 1")
    with pytest.raises(ConfigError, match=f"{name}: (cannot read the run file|not a TOML file): "):
        RunConfig.load(tmp_path / name)


def test_a_model_config_is_read_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    for origin in ("config = 'tiny/config.json'", "config = 'tiny'", "weights = 'tiny'"):
        assert load(tmp_path, model=f"[model]\n{origin}").model_spec().num_kv_heads == 2
    assert "cannot read the model config" in refusal(tmp_path, model="[model]\nconfig = 'big'")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA | {"model_type": None}))
    assert refusal(tmp_path, model="[model]\nconfig = 'tiny'") == (
        "/run.toml: the model config /tiny/config.json has no model_type; give a config.json as transformers "
        "writes it"
    )


def test_an_unsupported_architecture_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mixtral"}))
    with pytest.raises(UnsupportedError, match="run.toml: unsupported architecture .*mixtral"):
        load(tmp_path, model="[model]\nconfig = 'config.json'")


def test_a_rope_section_changes_the_model_it_is_given(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LLAMA | {"rope_theta": 5e5, "rope_scaling": llama3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = "[model]\nconfig = 'config.json'\n[model.rope]\n"
    changed = load(tmp_path, model=model + "factor = 8").model_spec().rope
    assert changed and (changed.kind, changed.factor, changed.low_freq_factor) == ("llama3", 8.0, 1.0)
    other = load(tmp_path, model=model + "kind = 'yarn'\nfactor = 8").model_spec().rope
    assert other and (other.theta, other.original_max_positions, other.low_freq_factor) == (5e5, 64, None)


def test_every_key_is_explained() -> None:
    keys = known_keys()
    silent = [key for key, leaf in keys.items() if not leaf.get("description")]
    assert {key.rpartition(".")[0] for key in silent} <= {"model.spec", "model.spec.rope"}
    assert {"layout.cp", "layout.tp", "model.rope.factor", "data.sequence", "stages.steps"} <= keys.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[layout]\ncp = 8\n[attention]\ntransport = "all_to_all"',
            "deals 4 query heads (tp=1) over 8 ranks",
        ),
        ('[layout]\ncp = 4\ntp = 2\n[attention]\ntransport = "all_to_all"', "deals 2 query heads (tp=2)"),
        (
            '[layout]\ncp = 4\n[attention]\ntransport = "all_to_all+ring"',
            "has two levels: set layout.cp_outer",
        ),
        ('[layout]\ncp = 2\n[attention]\ntransport = "all_to_all"\nhead_groups = 3', "in 3 groups"),
        ('[attention]\ntransport = "all_gather"\nhead_groups = 3', "head_groups=3 are more than 2 K/V heads"),
        ('[attention]\ngradient_dtype = "bfloat16"', "narrower than train.dtype=float32"),
        ("[attention]\nstages = 0", "stages"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_neighbours_that_trade_heads_are_the_layouts(tmp_path: Path) -> None:
    text = "[layout]\ncp_outer = 2\ncp_inner = 4\n[attention]\ntransport = 'all_to_all+needed'"
    config = load(tmp_path, text)
    assert config.transport_options(config.layout).inner == 4
    assert config.transport_options(Layout()).inner == 1
