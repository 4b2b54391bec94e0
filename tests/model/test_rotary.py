"""The rotation by itself; its angles are compared with transformers in test_decoder."""

import math

import pytest
import torch

from longspan.errors import UnsupportedError
from longspan.model import rotary, rotate
from longspan.spec.model import RopeSpec


def test_angles_are_exact_at_far_positions() -> None:
    far = 10_000_019
    cos_tP, sin_tP = rotary(RopeSpec(), torch.tensor([far]), 4, torch.float64)
    assert cos_tP[0].tolist() == pytest.approx([math.cos(far), math.cos(far / 100)], abs=1e-8)
    assert sin_tP[0].tolist() == pytest.approx([math.sin(far), math.sin(far / 100)], abs=1e-8)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_is_never_narrower_than_float32(dtype: torch.dtype, kept: torch.dtype) -> None:
    rope = rotary(RopeSpec(), torch.arange(3), 8, dtype)
    assert {rope.cos_tP.dtype, rope.sin_tP.dtype} == {kept}
    x_tHD = torch.randn(3, 2, 8).to(dtype)
    turned_tHD = rotate(x_tHD, *rope)
    assert turned_tHD.dtype == dtype
    assert torch.equal(turned_tHD, rotate(x_tHD.to(kept), *rope).to(dtype))


def test_scores_depend_on_the_distance_only() -> None:
    q_1HD, k_1HD = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        rope = rotary(RopeSpec(), torch.tensor([query_at, key_at]), 8, torch.float64)
        q_2HD = rotate(torch.cat([q_1HD, k_1HD]), *rope)
        return float((q_2HD[0] * q_2HD[1]).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-10)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_yarn_with_one_pair_in_its_ramp() -> None:
    """The ramp has no width when both borders round to the same pair; it must not divide by zero."""
    rope = RopeSpec(kind="yarn", factor=4.0, original_max_positions=2, beta_fast=32.0, beta_slow=1.0)
    cos_tP, _ = rotary(rope, torch.arange(5), 4)
    assert cos_tP.isfinite().all()


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(kind="dynamic", factor=2.0),
        RopeSpec(kind="longrope", short_factors=(1.0,), long_factors=(2.0,), original_max_positions=4),
    ],
    ids=lambda rope: rope.kind,
)
def test_refuses_angles_that_depend_on_the_longest_sequence(rope: RopeSpec) -> None:
    with pytest.raises(UnsupportedError, match=rope.kind):
        rotary(rope, torch.arange(3), 2)
