"""Tiny random Hugging Face models of every family, and our decoder with the same weights."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longspan.model import Decoder, materialise, rotary
from longspan.spec.model import ModelSpec
from longspan.verify.reference import dense_attend

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = SIZES | {"model_type": "llama"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 2.0, "beta_slow": 0.5, "truncate": False}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
QWEN_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": LLAMA | {"num_key_value_heads": 4},
    "llama3": LLAMA | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
    "linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": LLAMA | {"rope_parameters": YARN | {"rope_theta": 1000.0}},
    "yarn-mscales": LLAMA | {"rope_scaling": YARN | MSCALES},
    "mqa": LLAMA | {"num_key_value_heads": 1},
    "tied": LLAMA | {"tie_word_embeddings": True},
    "head-dim": LLAMA | {"head_dim": 10},
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 7},
    "mistral-global": SIZES | {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-3},
    "qwen2": SIZES | {"model_type": "qwen2"} | QWEN_WINDOWS,
    "qwen2-yarn": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 16},
    "qwen3-windows": SIZES
    | {"model_type": "qwen3", "head_dim": 8, "attention_bias": True}
    | QWEN_WINDOWS
    | {"layer_types": QWEN_TYPES},
}


def hf_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose every weight matters: no zero bias, no norm of ones, scores of order one."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model.to(dtype).eval()


def hf_logits(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    positions_1T = torch.arange(len(tokens_T))[None]
    with torch.no_grad():
        return model(tokens_T[None], position_ids=positions_1T, use_cache=False).logits[0]


def our_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}


def our_decoder(spec: ModelSpec, model: PreTrainedModel) -> Decoder:
    decoder = Decoder(spec, model.dtype)
    materialise(decoder, our_weights(model))
    return decoder


def our_logits(decoder: Decoder, tokens_T: Tensor, spec: ModelSpec | None = None) -> Tensor:
    """Logits of one document; `spec` replaces the decoder's own RoPE."""
    spec, positions_T = spec or decoder.spec, torch.arange(len(tokens_T))
    assert spec.rope is not None
    rope = rotary(spec.rope, positions_T, spec.head_dim, decoder.compute_dtype)
    with torch.no_grad():
        return decoder.logits(
            decoder(tokens_T, rope, dense_attend(torch.zeros_like(tokens_T), positions_T, chunk=16))
        )
