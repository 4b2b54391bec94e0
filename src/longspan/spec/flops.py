"""Floating-point operations of a step in closed form, a multiply and an add counted as two.

Attention is counted from the exact number of (query, key) pairs, never from a profiler, which sees a fused
attention as nothing or as the full square. A training step is 3 forward passes of the matrix products
(forward, gradient of the input, gradient of the weight) and 3.5 of attention (the forward is two products; a
fused backward repeats one of them and adds four of the same size). Norms, activations, rotations and biases
are not counted.
"""

from dataclasses import dataclass
from typing import Literal

from longspan.spec.model import ModelSpec

__all__ = ["StepFlops", "attention_flops", "gemm_flops", "logits_flops", "step_flops"]


def gemm_flops(spec: ModelSpec, tokens: int, tp: int = 1) -> int:
    """Matrix products of one forward pass through all layers, summed over the tp ranks; logits are apart.

    With fewer key/value heads than tp ranks every rank computes one head, so that heads computed more than
    once are counted more than once; `tp=1` gives the useful number.

    Args:
        spec: the model.
        tokens: tokens that pass through the layers.
        tp: ranks that share one layer's matrix products.
    """
    query = spec.num_heads * spec.head_dim
    key_value = max(spec.num_kv_heads, tp) * spec.head_dim
    attention = spec.hidden_size * (2 * query + 2 * key_value)
    mlp = (3 if spec.mlp == "swiglu" else 2) * spec.hidden_size * spec.intermediate_size
    return 2 * tokens * spec.num_layers * (attention + mlp)


def attention_flops(spec: ModelSpec, pairs_by_window: dict[int | None, int]) -> int:
    """Scores and weighted values of one forward pass through all layers.

    Args:
        spec: the model.
        pairs_by_window: (query, key) pairs that one layer with this window computes, over the whole batch; an
            entry for every window in `spec.window_layers`.
    """
    pairs = sum(layers * pairs_by_window[window] for window, layers in spec.window_layers.items())
    return 4 * pairs * spec.num_heads * spec.head_dim


def logits_flops(spec: ModelSpec, tokens: int) -> int:
    """The output projection of one forward pass."""
    return 2 * tokens * spec.hidden_size * spec.vocab_size


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step over all ranks: what the model needs (useful) and what is run (executed)."""

    gemm_useful: int
    gemm_executed: int
    attention_useful: int
    attention_executed: int
    logits: int
    """Not part of `useful` and `executed`."""

    @property
    def useful(self) -> int:
        """Matrix products and attention that any implementation must compute."""
        return self.gemm_useful + self.attention_useful

    @property
    def executed(self) -> int:
        """The same, with replicated key/value heads and recomputation."""
        return self.gemm_executed + self.attention_executed


def step_flops(
    spec: ModelSpec,
    tokens: int,
    pairs_by_window: dict[int | None, int],
    *,
    tp: int = 1,
    recompute: Literal["none", "full"] = "none",
    attention_kept: bool = False,
) -> StepFlops:
    """FLOPs of one training step (forward, backward, recomputation).

    Args:
        spec: the model.
        tokens: tokens of the step, over all micro-batches and all ranks that hold different ones.
        pairs_by_window: as for `attention_flops`.
        tp: ranks that share one layer's matrix products.
        recompute: `full` runs the forward of every layer a second time. (With early stop, the default of
            `torch.utils.checkpoint`, the layer's last product is not repeated; it is counted here.)
        attention_kept: the recomputation reuses the attention's output.
    """
    gemm, attention = gemm_flops(spec, tokens, tp), attention_flops(spec, pairs_by_window)
    again = recompute == "full"
    return StepFlops(
        gemm_useful=3 * gemm_flops(spec, tokens),
        gemm_executed=(4 if again else 3) * gemm,
        attention_useful=7 * attention // 2,
        attention_executed=(9 if again and not attention_kept else 7) * attention // 2,
        logits=3 * logits_flops(spec, tokens),
    )
