"""Closed forms against counts by hand."""

import pytest

from longspan.spec.flops import StepFlops, attention_flops, gemm_flops, logits_flops, step_flops
from longspan.spec.model import ModelSpec

SPEC = ModelSpec(
    num_layers=3,
    hidden_size=10,
    intermediate_size=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=11,
    windows=(None, 2, 2),
)
# Multiply-adds of a token in one layer: q and o 10 x 24; k and v 10 x 12, or 10 x 6 a rank; three 10 x 7.
PROJECTIONS, KEY_VALUES, MLP = 2 * 240, 2 * 120, 3 * 70
PAIRS: dict[int | None, int] = {None: 15, 2: 9}


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 2), (4, 4)])
def test_gemm(tp: int, heads: int) -> None:
    per_token = PROJECTIONS + KEY_VALUES * heads // 2 + MLP
    assert gemm_flops(SPEC, 5, tp) == 2 * 5 * 3 * per_token


def test_gelu_has_two_products() -> None:
    spec = SPEC.with_changes(mlp="gelu")
    assert gemm_flops(SPEC, 1) - gemm_flops(spec, 1) == 2 * 3 * 70


def test_attention_counts_each_window_once_a_layer() -> None:
    assert attention_flops(SPEC, PAIRS) == 4 * (15 + 2 * 9) * 4 * 6


def test_attention_needs_pairs_of_every_window() -> None:
    with pytest.raises(KeyError):
        attention_flops(SPEC, {None: 15})


def test_logits() -> None:
    assert logits_flops(SPEC, 5) == 2 * 5 * 10 * 11


def test_a_step_without_recomputation() -> None:
    gemm, attention = gemm_flops(SPEC, 5), attention_flops(SPEC, PAIRS)
    step = step_flops(SPEC, 5, PAIRS)
    assert step == StepFlops(
        3 * gemm, 3 * gemm, 7 * attention // 2, 7 * attention // 2, 3 * logits_flops(SPEC, 5)
    )
    assert step.useful == step.executed == 3 * gemm + 3.5 * attention


@pytest.mark.parametrize(("kept", "attentions"), [(False, 4.5), (True, 3.5)])
def test_recomputation_and_replicated_heads_are_executed_not_useful(kept: bool, attentions: float) -> None:
    attention = attention_flops(SPEC, PAIRS)
    step = step_flops(SPEC, 5, PAIRS, tp=4, recompute="full", attention_kept=kept)
    assert step.useful == step_flops(SPEC, 5, PAIRS).useful
    assert step.executed == 4 * gemm_flops(SPEC, 5, tp=4) + attentions * attention
    assert step.logits == 3 * logits_flops(SPEC, 5)
