"""Mask: exact pair counts and refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.spec.mask import Mask

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def visible(mask: Mask) -> np.ndarray:
    """Boolean [T, T], written pair by pair from the definition."""
    seen = np.zeros((mask.tokens, mask.tokens), dtype=bool)
    for start, stop in zip(mask.cu_seqlens, mask.cu_seqlens[1:], strict=False):
        for query in range(start, stop):
            for key in range(start, stop):
                late = mask.causal and key > query
                far = mask.window is not None and query - key >= mask.window
                seen[query, key] = not (late or far)
    return seen


def bounds(lengths: list[int]) -> tuple[int, ...]:
    return (0, *np.cumsum(lengths).tolist())


@given(LENGTHS, st.booleans(), st.none() | st.integers(1, 50))
def test_pairs_equal_a_count(lengths, causal, window):
    mask = Mask(bounds(lengths), causal, window if causal else None)
    assert mask.pairs() == visible(mask).sum()


@pytest.mark.parametrize(
    ("cu_seqlens", "options"),
    [
        ((1, 4), {}),
        ((0,), {}),
        ((0, 4, 4), {}),
        ((0, 4), {"window": 0}),
        ((0, 4), {"causal": False, "window": 3}),
    ],
)
def test_refusals(cu_seqlens, options):
    with pytest.raises(ConfigError):
        Mask(cu_seqlens, **options)
