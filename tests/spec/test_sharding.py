"""Sharding: every token once, even counts, balanced causal work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.spec.sharding import Sharding, deal


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 9))
def test_every_token_once_and_even(lengths, cp):
    bounds = (0, *np.cumsum(lengths).tolist())
    for kind in ("contiguous", "zigzag", "document_zigzag"):
        sharding = deal(kind, bounds, 1, cp)
        dealt = np.concatenate([sharding.index(rank) for rank in range(cp)])
        assert sorted(dealt) == list(range(bounds[-1]))
        counts = [sharding.num_tokens(rank) for rank in range(cp)]
        assert max(counts) - min(counts) <= 2
        assert all((np.diff(sharding.index(rank)) > 0).all() for rank in range(cp))


def test_zigzag_pairs_early_with_late_pieces():
    assert Sharding.zigzag((0, 8), 2).segments == (((0, 2), (6, 8)), ((2, 6),))


def test_zigzag_is_per_row():
    assert deal("zigzag", (0, 16), 2, 2).segments == (((0, 2), (6, 10), (14, 16)), ((2, 6), (10, 14)))


@pytest.mark.parametrize("segments", [(((0, 2),), ((1, 4),)), (((0, 2),), ((3, 4),)), (((0, 2), (2, 2)),)])
def test_a_lost_or_repeated_token_is_refused(segments):
    with pytest.raises(ConfigError):
        Sharding(segments)


def test_unknown_kind():
    with pytest.raises(ConfigError, match="striped"):
        deal("striped", (0, 4), 1, 2)
