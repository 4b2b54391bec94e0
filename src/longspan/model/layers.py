"""The layers of a decoder: plain modules in which every size comes from the tensors at hand.

Weights are cast to the activations' dtype where they are used, so weights may be float32 while the
computation is bfloat16. Nothing here knows of ranks: tensor parallelism swaps the weights for sharded ones
from outside, and heads are counted from what the projections return.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from longspan.model.rotary import rotate
from longspan.spec.model import ModelSpec

__all__ = ["Attend", "Attention", "DecoderLayer", "Embedding", "Linear", "Mlp", "RMSNorm"]

# t this rank's tokens, H query heads, K key/value heads, D head size, E hidden, F MLP width, P = D / 2

Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""`attend(q_tHD, k_tKD, v_tKD, window) -> out_tHD`: causal inside documents, scores scaled by D ** -0.5."""


class Linear(nn.Linear):
    """A linear layer with its weight cast to the input's dtype."""

    def reset_parameters(self) -> None:
        """Leave the weights alone: they come from `materialise`."""

    def forward(self, input: Tensor) -> Tensor:
        """The projection of every token."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class Embedding(nn.Embedding):
    """A token embedding, returned in the weight's dtype."""

    def reset_parameters(self) -> None:
        """Leave the weights alone: they come from `materialise`."""


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, with its weight cast to the input's dtype."""

    def reset_parameters(self) -> None:
        """Leave the weights alone: they come from `materialise`."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm of every token or head."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Self-attention; which keys a query sees is the caller's `attend` to say."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = spec.head_dim, window
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, queries, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.o_proj = Linear(queries, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x_tE: Tensor, cos_tP: Tensor, sin_tP: Tensor, attend: Attend) -> Tensor:
        """The attention branch of every token."""
        q_tHD, k_tKD, v_tKD = (
            project(x_tE).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_tHD, k_tKD = self.q_norm(q_tHD), self.k_norm(k_tKD)
        q_tHD, k_tKD = rotate(q_tHD, cos_tP, sin_tP), rotate(k_tKD, cos_tP, sin_tP)
        return self.o_proj(attend(q_tHD, k_tKD, v_tKD, self.window).flatten(-2))


class Mlp(nn.Module):
    """The SwiGLU feed-forward branch."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x_tE: Tensor) -> Tensor:
        """The feed-forward branch of every token."""
        return self.down_proj(F.silu(self.gate_proj(x_tE)) * self.up_proj(x_tE))


class DecoderLayer(nn.Module):
    """One pre-norm block."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, window)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x_tE: Tensor, cos_tP: Tensor, sin_tP: Tensor, attend: Attend) -> Tensor:
        """The residual stream after this block."""
        # Never `+=`: an in-place add would drop the backward hooks of a wrapped module's output.
        x_tE = x_tE + self.self_attn(self.input_layernorm(x_tE), cos_tP, sin_tP, attend)
        return x_tE + self.mlp(self.post_attention_layernorm(x_tE))
