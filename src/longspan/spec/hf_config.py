"""Between a Hugging Face `config.json` and the fields of a `ModelSpec`.

A key that transformers 5.24 would default is given the same default here. Features that change the model and
that Longspan cannot honour are refused by name; what transformers itself ignores (token ids, cache settings)
is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from longspan.spec.model import ModelSpec, RopeSpec

__all__ = ["read_config", "write_config"]

Config = Mapping[str, Any]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

_DENSE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _DENSE_DEFAULTS | {"max_position_embeddings": 2048},
    "mistral": _DENSE_DEFAULTS
    | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _DENSE_DEFAULTS | _QWEN_DEFAULTS,
    "qwen3": _DENSE_DEFAULTS | _QWEN_DEFAULTS | {"head_dim": 128},
    "gpt2": {
        "n_positions": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}
_SIZES = {
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "dense": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
}

# Keys that change the model, and the values at which they do not.
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "auto_map": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}

_ROPE_RENAMED = {
    "rope_theta": "theta",
    "original_max_position_embeddings": "original_max_positions",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}


def read_config(config: Config | str | Path) -> dict[str, Any]:
    """Fields of the `ModelSpec` that a configuration, its file or its folder describes.

    Raises:
        UnsupportedError: an architecture or a feature that cannot be honoured.
        ConfigError: the file cannot be read or lacks a size.
    """
    given = config if isinstance(config, Mapping) else _load(Path(config))
    if not given.get("model_type"):
        named = "" if isinstance(config, Mapping) else f" {_file(Path(config))}"
        raise ConfigError(
            f"the model config{named} has no model_type; give a config.json as transformers writes it"
        )
    family = _family(given)
    _refuse_what_is_not_honoured(given)
    for size in _SIZES.get(family, _SIZES["dense"]):
        if not isinstance(given.get(size), int):
            raise ConfigError(f"model config: {size}={given.get(size)!r} must be a whole number")
    full = _DEFAULTS[family] | dict(given)
    try:
        return _read_gpt2(full) if family == "gpt2" else _read_dense(family, full)
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"model config: a value has the wrong type: {error}") from error


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """A `config.json` for the spec, in the form that transformers 4 and 5 both read."""
    fields = _write_gpt2(spec) if spec.family == "gpt2" else _write_dense(spec)
    return {"architectures": [_ARCHITECTURES[spec.family]], "model_type": spec.family} | fields


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _load(path: Path) -> Config:
    path = _file(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"the model config {path} is not a JSON object")
    return config


def _family(config: Config) -> str:
    family, architectures = str(config.get("model_type")), config.get("architectures") or []
    known = _ARCHITECTURES.get(family)
    if known is None or (architectures and known not in architectures):
        named = ", ".join([f"model_type={family}", *architectures])
        supported = ", ".join(sorted(_ARCHITECTURES.values()))
        raise UnsupportedError(f"unsupported architecture ({named}); supported are {supported}")
    return family


def _refuse_what_is_not_honoured(config: Config) -> None:
    for key, harmless in _NOT_HONOURED.items():
        value = config.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedError(f"model config: {key}={value!r} cannot be honoured")


def _read_dense(family: str, config: Config) -> dict[str, Any]:
    if config["hidden_act"] != "silu":
        raise UnsupportedError(
            f"model config: hidden_act={config['hidden_act']!r} cannot be honoured, only 'silu'"
        )
    heads, attention_bias = config["num_attention_heads"], config["attention_bias"]
    fields = {
        "family": family,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config["num_key_value_heads"] or heads,
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope": _read_rope(config),
        "qkv_bias": family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        "output_bias": family in ("llama", "qwen3") and attention_bias,
        "mlp_bias": family == "llama" and config["mlp_bias"],
        "windows": _read_windows(family, config),
        "tie_embeddings": config["tie_word_embeddings"],
        "attention_dropout": config["attention_dropout"] or 0.0,
        "initializer_range": config["initializer_range"],
    }
    return fields | ({"head_dim": config["head_dim"]} if config["head_dim"] else {})


def _read_gpt2(config: Config) -> dict[str, Any]:
    if config["activation_function"] not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        raise UnsupportedError(
            f"model config: activation_function={config['activation_function']!r} is not a GELU"
        )
    return {
        "family": "gpt2",
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "intermediate_size": config["n_inner"] or 4 * config["n_embd"],
        "num_heads": config["n_head"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["n_positions"],
        "norm_eps": config["layer_norm_epsilon"],
        "tie_embeddings": config["tie_word_embeddings"],
        "dropout": max(config["resid_pdrop"], config["embd_pdrop"]),
        "attention_dropout": config["attn_pdrop"],
        "initializer_range": config["initializer_range"],
    }


def _read_windows(family: str, config: Config) -> list[int | None]:
    """Window of each layer, as transformers derives it."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if family == "llama" and window is not None:
        raise UnsupportedError(f"model config: sliding_window={window} does nothing in a llama; drop it")
    if not config.get("use_sliding_window", True):
        window = None
    first = config.get("max_window_layers", 0) if window else layers
    implied = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    types = config.get("layer_types") or implied
    if family in ("llama", "mistral") and types != implied:
        raise UnsupportedError(f"model config: layer_types of a {family} must all be '{implied[0]}'")
    return [_layer_window(layer, kind, window) for layer, kind in enumerate(types)]


def _layer_window(layer: int, kind: str, window: int | None) -> int | None:
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedError(f"model config: layer {layer} has '{kind}', which cannot be honoured")
    if kind == "sliding_attention" and not window:
        raise ConfigError(f"model config: layer {layer} slides, but sliding_window is off")
    return window if kind == "sliding_attention" else None


def _read_rope(config: Config) -> dict[str, Any]:
    """Fields of the `RopeSpec`, from `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    given = {key: value for key, value in settings.items() if value is not None}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedError("model config: RoPE that differs by layer type cannot be honoured")
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise UnsupportedError(f"model config: partial_rotary_factor={partial} cannot be honoured")
    old_kind = given.pop("type", "default")
    kind = given.pop("rope_type", old_kind)
    given.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    if kind in ("llama3", "yarn", "longrope"):
        _fill_in_pretraining_length(kind, given, config)
    return {"kind": kind} | {_ROPE_RENAMED.get(key, key): value for key, value in given.items()}


def _fill_in_pretraining_length(kind: str, rope: dict[str, Any], config: Config) -> None:
    longest, key = config["max_position_embeddings"], "original_max_position_embeddings"
    rope[key] = config.get(key) or rope.get(key, longest)
    if kind == "yarn":
        rope.setdefault("factor", longest / rope[key])


def _write_dense(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.rope
    fields = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope.theta if rope else None,
        "rope_scaling": _write_rope_scaling(rope) if rope else None,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": spec.attention_dropout,
        "initializer_range": spec.initializer_range,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return fields | _write_family(spec)


def _write_family(spec: ModelSpec) -> dict[str, Any]:
    if spec.family == "llama":
        return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    if spec.family == "mistral":
        return {"sliding_window": spec.windows[0]}
    sliding = [layer for layer, window in enumerate(spec.windows) if window]
    types = ["sliding_attention" if window else "full_attention" for window in spec.windows]
    fields = {
        "use_sliding_window": bool(sliding),
        "sliding_window": spec.windows[sliding[0]] if sliding else None,
        "max_window_layers": sliding[0] if sliding else spec.num_layers,
        "layer_types": types,
    }
    return fields | ({"attention_bias": spec.qkv_bias} if spec.family == "qwen3" else {})


def _write_rope_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    hf_names = {ours: theirs for theirs, ours in _ROPE_RENAMED.items()}
    scaling = rope.model_dump(mode="json", exclude={"kind", "theta"}, exclude_none=True)
    return {"rope_type": rope.kind} | {hf_names.get(key, key): value for key, value in scaling.items()}


def _write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.intermediate_size,
        "n_positions": spec.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": spec.attention_dropout,
        "initializer_range": spec.initializer_range,
    }
