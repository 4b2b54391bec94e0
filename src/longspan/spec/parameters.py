"""The parameters of a model: names and shapes, from the specification alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.spec.model import ModelSpec

__all__ = ["layer_shapes", "parameter_shapes"]

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Shape of every parameter, in the order of use.

    Names are Hugging Face's for Llama-style decoders without the leading `model.`; a tied output projection
    does not appear. Weights are (output, input). GPT-2 blocks are described in the same names.
    """
    table = (spec.vocab_size, spec.hidden_size)
    shapes: Shapes = {"embed_tokens.weight": table}
    if spec.rope is None:
        shapes["embed_positions.weight"] = (spec.max_positions, spec.hidden_size)
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(spec).items()}
    shapes |= _norm("norm", spec.hidden_size, bias=spec.norm == "layernorm")
    return shapes if spec.tie_embeddings else shapes | {"lm_head.weight": table}


def layer_shapes(spec: ModelSpec) -> Shapes:
    """Shape of every parameter of one decoder layer, by its name inside the layer."""
    bias = spec.norm == "layernorm"
    return (
        _norm("input_layernorm", spec.hidden_size, bias)
        | _attention(spec)
        | _norm("post_attention_layernorm", spec.hidden_size, bias)
        | _mlp(spec)
    )


def _attention(spec: ModelSpec) -> Shapes:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = (
        _linear("self_attn.q_proj", queries, spec.hidden_size, spec.qkv_bias)
        | _linear("self_attn.k_proj", keys, spec.hidden_size, spec.qkv_bias)
        | _linear("self_attn.v_proj", keys, spec.hidden_size, spec.qkv_bias)
        | _linear("self_attn.o_proj", spec.hidden_size, queries, spec.output_bias)
    )
    if spec.qk_norm:
        shapes |= _norm("self_attn.q_norm", spec.head_dim) | _norm("self_attn.k_norm", spec.head_dim)
    return shapes


def _mlp(spec: ModelSpec) -> Shapes:
    inputs = ("mlp.gate_proj", "mlp.up_proj") if spec.mlp == "swiglu" else ("mlp.up_proj",)
    shapes: Shapes = {}
    for name in inputs:
        shapes |= _linear(name, spec.intermediate_size, spec.hidden_size, spec.mlp_bias)
    return shapes | _linear("mlp.down_proj", spec.hidden_size, spec.intermediate_size, spec.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm(name: str, size: int, bias: bool = False) -> Shapes:
    weight: Shapes = {f"{name}.weight": (size,)}
    return weight | {f"{name}.bias": (size,)} if bias else weight
