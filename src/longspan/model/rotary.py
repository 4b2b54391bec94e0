"""Rotary position embedding (arXiv:2104.09864) with the scalings of Llama 3.1 and of YaRN (arXiv:2309.00071).

Pairs are (i, i + D/2), as in Hugging Face checkpoints. Angles are computed in float64 and rounded once;
transformers computes them in float32, which loses about position * 1e-7 radians.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.errors import UnsupportedError
from longspan.spec.model import RopeSpec

__all__ = ["Rotary", "rotary", "rotate"]

# t this rank's tokens, H heads (query or key), D head size, P = D / 2 rotated pairs


class Rotary(NamedTuple):
    """Cosines and sines of the angles by which each token's queries and keys turn, in at least float32."""

    cos_tP: Tensor
    sin_tP: Tensor


def rotary(rope: RopeSpec, positions_t: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotary:
    """The rotation of every token, once per batch for all layers.

    Args:
        rope: the embedding; kinds whose angles depend on the longest sequence are refused.
        positions_t: place of each token inside its document, int, shape (t,).
        head_dim: size D of one head, even.
        dtype: dtype of the activations; anything narrower than float32 gets float32.

    Raises:
        UnsupportedError: a dynamic or longrope embedding.
    """
    frequencies_P = _frequencies(rope, head_dim).to(positions_t.device)
    angles_tP = positions_t.double()[:, None] * frequencies_P
    scale, wide = _attention_factor(rope), torch.promote_types(dtype, torch.float32)
    return Rotary((angles_tP.cos() * scale).to(wide), (angles_tP.sin() * scale).to(wide))


def rotate(x_tHD: Tensor, cos_tP: Tensor, sin_tP: Tensor) -> Tensor:
    """Queries or keys turned by their tokens' angles, in the angles' dtype; returned in their own."""
    cos_t1P, sin_t1P = cos_tP[:, None], sin_tP[:, None]
    first_tHP, second_tHP = x_tHD.to(cos_tP.dtype).chunk(2, dim=-1)
    turned = (first_tHP * cos_t1P - second_tHP * sin_t1P, second_tHP * cos_t1P + first_tHP * sin_t1P)
    return torch.cat(turned, dim=-1).to(x_tHD.dtype)


def _frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair, float64, shape (P,)."""
    plain_P = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "default":
        return plain_P
    if rope.kind == "linear":
        return plain_P / _given(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, plain_P)
    if rope.kind == "yarn":
        return _yarn(rope, plain_P, head_dim)
    raise UnsupportedError(
        f"{rope.kind} RoPE depends on the longest sequence; use default, linear, llama3 or yarn"
    )


def _llama3(rope: RopeSpec, plain_P: Tensor) -> Tensor:
    """Long waves stretched by `factor`, short ones kept, those between blended by turns in pre-training."""
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    turns_P = _given(rope.original_max_positions) * plain_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return plain_P * (kept_P + (1 - kept_P) / _given(rope.factor))


def _yarn(rope: RopeSpec, plain_P: Tensor, head_dim: int) -> Tensor:
    """NTK-by-parts: pairs that turn often are kept, those that turn rarely stretched, a ramp between."""

    def pair_that_turns(times: float) -> float:
        wavelengths = _given(rope.original_max_positions) / (times * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast or 32), pair_that_turns(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # A ramp of no width would divide by zero; this is the width that transformers gives it.
    width = last - first or 0.001
    stretched_P = ((torch.arange(len(plain_P), dtype=torch.float64) - first) / width).clamp(0, 1)
    return plain_P * (1 - stretched_P + stretched_P / _given(rope.factor))


def _attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: 1 but for YaRN, whose scores are sharpened (its equation 22)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = math.log(max(_given(rope.factor), 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * growth + 1.0) / (0.1 * rope.mscale_all_dim * growth + 1.0)
    return 0.1 * growth + 1.0


def _given(value: float | None) -> float:
    assert value is not None, "RopeSpec requires what its kind reads"
    return value
