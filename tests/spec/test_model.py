"""Model specifications, against the configuration classes of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from longspan.errors import ConfigError, LongspanError, UnsupportedError
from longspan.spec.model import ModelSpec, RopeSpec

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
LLAMA = SIZES | {"model_type": "llama"}
QWEN = SIZES | {"model_type": "qwen2", "num_key_value_heads": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-all": LLAMA
    | {
        "num_key_value_heads": 4,
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    }
    | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "attention_dropout": 0.1},
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-dynamic": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama-longrope": LLAMA | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 512},
    "mistral": SIZES | {"model_type": "mistral"},
    "mistral-global": SIZES | {"model_type": "mistral", "sliding_window": None},
    "qwen2": QWEN,
    "qwen2-windows": QWEN | SLIDING,
    "qwen2-yarn": QWEN
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False}},
    "qwen3": SIZES | {"model_type": "qwen3", "num_key_value_heads": 8},
    "qwen3-windows": SIZES
    | {"model_type": "qwen3", "num_key_value_heads": 8, "attention_bias": True}
    | SLIDING
    | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "gpt2": GPT2,
    "gpt2-wide": GPT2 | {"n_inner": 40, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.2},
}
CASES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@CASES
def test_reads_what_transformers_reads(config: dict[str, Any]) -> None:
    """The defaults of absent keys, and the older forms of keys, are those of transformers."""
    full = AutoConfig.for_model(**config)
    spec = ModelSpec.from_hf(config)
    assert ModelSpec.from_hf(full.to_dict()) == spec
    assert ModelSpec.from_hf(full.to_diff_dict()) == spec


@CASES
def test_writes_what_transformers_reads(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf(config)
    read = AutoConfig.for_model(**spec.to_hf())
    assert ModelSpec.from_hf(read.to_dict()) == spec


@CASES
def test_round_trips_as_a_value(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf(config)
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    assert len({spec, spec.with_changes(), spec.with_changes(vocab_size=62)}) == 2


@pytest.mark.parametrize(
    "case", ["llama", "llama-all", "mistral", "qwen2", "qwen3", "qwen3-windows", "gpt2-wide"]
)
def test_counts_the_parameters_of_transformers(case: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[case]))
    assert ModelSpec.from_hf(CONFIGS[case]).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("case", "windows"),
    [
        ("llama", (None,) * 4),
        ("mistral", (4096,) * 4),
        ("mistral-global", (None,) * 4),
        ("qwen2", (None,) * 4),
        ("qwen2-windows", (None, None, None, 5)),
        ("qwen3-windows", (None, 5, None, 5)),
    ],
)
def test_windows(case: str, windows: tuple[int | None, ...]) -> None:
    spec = ModelSpec.from_hf(CONFIGS[case])
    assert spec.windows == windows
    assert spec.window_layers == {window: windows.count(window) for window in windows}


def test_families_differ_in_biases_and_norms() -> None:
    read = {name: ModelSpec.from_hf(config) for name, config in CONFIGS.items()}
    biases = {
        name: (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm) for name, spec in read.items()
    }
    assert biases["llama"] == biases["mistral"] == (False, False, False, False)
    assert biases["llama-all"] == (True, True, True, False)
    assert biases["qwen2"] == (True, False, False, False)
    assert biases["qwen3"] == (False, False, False, True)
    assert biases["qwen3-windows"] == (True, True, False, True)


def test_describes_gpt2_and_says_why_it_is_not_trained() -> None:
    spec = ModelSpec.from_hf(GPT2)
    assert (spec.norm, spec.mlp, spec.rope, spec.max_positions, spec.intermediate_size) == (
        "layernorm",
        "gelu",
        None,
        128,
        128,
    )
    refusal = spec.refusal() or ""
    for reason in ("gpt2", "LayerNorm", "GELU", "learned positions", "dropout 0.1", "unfused"):
        assert reason in refusal


def test_a_hand_written_gpt3_takes_its_familys_choices() -> None:
    sizes = {"num_layers": 96, "hidden_size": 12288, "intermediate_size": 4 * 12288, "num_heads": 96}
    spec = ModelSpec.model_validate({"family": "gpt2", "vocab_size": 50257, "max_positions": 2048} | sizes)
    assert 174e9 < spec.num_parameters < 176e9
    assert spec.refusal() is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_dropout": 0.1}, "attention dropout 0.1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic RoPE"),
        ({"rope_scaling": LONGROPE}, "longrope RoPE"),
    ],
)
def test_refuses_to_train_by_name(changes: dict[str, Any], reason: str) -> None:
    assert reason in (ModelSpec.from_hf(LLAMA | changes).refusal() or "")
    assert ModelSpec.from_hf(LLAMA).refusal() is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"model_type": "mamba"}, "mamba.*supported are.*LlamaForCausalLM"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "proportional"}}, "rope.kind='proportional'"),
        (LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        (QWEN | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by layer"),
        (LLAMA | {"sliding_window": 9}, "sliding_window=9"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 4}, "layer_types of a llama"),
        (QWEN | {"layer_types": ["linear_attention"] * 4}, "layer 0 has 'linear_attention'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"auto_map": {"AutoModel": "x"}}, "auto_map"),
        (GPT2 | {"activation_function": "relu"}, "activation_function='relu'"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_refuses_by_name_what_it_cannot_honour(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        ModelSpec.from_hf(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size=None must be"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size='wide'"),
        (LLAMA | {"rms_norm_eps": "small"}, "norm_eps='small'"),
        (LLAMA | {"rope_scaling": "linear"}, "wrong type"),
        (QWEN | SLIDING | {"max_window_layers": "all"}, "wrong type"),
        (LLAMA | {"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=8"),
        (LLAMA | {"hidden_size": 36}, "give head_dim"),
        (LLAMA | {"head_dim": 5}, "head_dim=5 must be even"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 2}},
            "does not read beta_fast",
        ),
        (QWEN | {"layer_types": ["sliding_attention"] * 4}, "layer 0 slides"),
        (QWEN | {"layer_types": ["full_attention"] * 3}, "windows has 3 entries for num_layers=4"),
    ],
)
def test_bad_configs_are_one_line(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ModelSpec.from_hf(config)
    assert "\n" not in str(caught.value)


def test_reads_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert (
        ModelSpec.from_hf(tmp_path)
        == ModelSpec.from_hf(str(tmp_path / "config.json"))
        == ModelSpec.from_hf(LLAMA)
    )
    (tmp_path / "bad.json").write_text("[1")
    (tmp_path / "list.json").write_text("[1]")
    for name in ("bad.json", "list.json", "absent.json"):
        with pytest.raises(ConfigError, match=name):
            ModelSpec.from_hf(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"windows": 3}, "windows"),
        ({"qk_norm": True}, "qk_norm"),
        ({"qkv_bias": True}, "output_bias"),
        ({"family": "mistral", "windows": [3, None, 3, 3]}, "windows"),
        ({"family": "qwen2", "qkv_bias": True, "windows": [3, None, 2, None]}, "windows"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_writes_no_config_that_loses_a_choice(changes: dict[str, Any], lost: str) -> None:
    spec = ModelSpec.from_hf(LLAMA).with_changes(**changes)
    with pytest.raises(UnsupportedError, match=f"cannot express this model's {lost}"):
        spec.to_hf()


def test_one_window_for_all_layers() -> None:
    spec = ModelSpec.from_hf(LLAMA)
    assert spec.with_changes(windows=7).windows == (7,) * 4
    assert spec.with_changes(windows=0).windows == (None,) * 4


@pytest.mark.parametrize(
    ("layers", "windows"),
    [
        (1, (None,)),
        (2, (None, 5)),
        (3, (None, None, 5)),
        (4, (None, None, None, 5)),
        (6, (None, None, None, 5, None, None)),
    ],
)
def test_fewer_layers_keep_every_window(layers: int, windows: tuple[int | None, ...]) -> None:
    assert ModelSpec.from_hf(CONFIGS["qwen2-windows"]).with_changes(num_layers=layers).windows == windows


def test_changes_are_checked() -> None:
    spec = ModelSpec.from_hf(LLAMA)
    with pytest.raises(ConfigError, match="must divide"):
        spec.with_changes(num_kv_heads=5)
    with pytest.raises(ValidationError, match="Extra inputs"):
        spec.with_changes(layers=3)
    with pytest.raises(ValidationError, match="frozen"):
        spec.num_layers = 3  # pyrefly: ignore[read-only]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"factor": 2.0}, "'default' does not read factor"),
        ({"kind": "yarn", "factor": 2.0}, "needs original_max_positions"),
        (
            {"kind": "llama3", "factor": 2.0},
            "needs high_freq_factor, low_freq_factor, original_max_positions",
        ),
        ({"kind": "linear", "factor": 2.0, "mscale": 1.0}, "does not read mscale"),
    ],
)
def test_rope_refuses_what_its_kind_ignores(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LongspanError, match=words):
        RopeSpec(**fields)
