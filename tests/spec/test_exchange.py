"""Exchange: blocks hold exactly the mask's pairs, messages match on both ends, needed rows only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.spec.blocks import NARROW, Block, cut
from longspan.spec.exchange import DEFAULT, Heads, Options, build, slice_heads
from longspan.spec.mask import Band, Mask
from longspan.spec.ranges import size
from longspan.spec.sharding import Sharding, deal
from tests.spec.test_mask import LENGTHS, bounds, visible

CASES = {
    "lengths": LENGTHS,
    "window": st.none() | st.integers(1, 2 * NARROW),
    "causal": st.booleans(),
    "cp": st.integers(1, 5),
    "kind": st.sampled_from(["contiguous", "zigzag", "document_zigzag"]),
    "transport": st.sampled_from(["ring", "all_gather", "needed"]),
    "options": st.sampled_from([Options(), Options(stages=3, direct_gradients=True), Options(head_groups=2)]),
}


def block_pairs(block: Block) -> np.ndarray:
    """Boolean [n, m] from the definition of the shapes."""
    i, j = np.ogrid[: block.q_stop - block.q_start, : block.k_stop - block.k_start]
    return {
        "full": (i >= 0) & (j >= 0),
        "causal": j <= i,
        "anticausal": j >= i,
        "band": (block.lowest <= i - j) & (i - j <= block.highest),
    }[block.shape]


def programs(lengths, window, causal, cp, kind, transport, options=DEFAULT):
    mask = Mask(bounds(lengths), causal, window if causal else None)
    sharding = deal(kind, mask.cu_seqlens, 1, cp)
    return mask, sharding, [build(mask, sharding, rank, transport, options) for rank in range(cp)]


@settings(max_examples=150, deadline=None)
@given(**{name: CASES[name] for name in CASES})
def test_blocks_hold_exactly_the_pairs_of_the_mask(**case):
    mask, sharding, exchanges = programs(**case)
    for direction in ("forward", "backward"):
        count = np.zeros((mask.tokens, mask.tokens), dtype=int)
        for rank, exchange in enumerate(exchanges):
            queries = sharding.index(rank)
            works = (work for step in getattr(exchange, direction) for work in step.work)
            # The other groups of heads do the same once more.
            for work in (work for work in works if not work.part):
                keys = sharding.index(work.source)
                held = np.concatenate([keys[a:b] for a, b in work.rows]) if work.rows else keys[:0]
                for block in work.blocks:
                    pairs = block_pairs(block)
                    assert pairs.sum() == block.pairs
                    assert pairs.any(axis=1).all(), "a row that sees no key must not reach a kernel"
                    grid = np.ix_(queries[block.q_start : block.q_stop], held[block.k_start : block.k_stop])
                    count[grid] += pairs
        assert (count == visible(mask)).all()


@settings(max_examples=150, deadline=None)
@given(**{name: CASES[name] for name in CASES})
def test_every_message_is_expected_by_its_receiver(**case):
    _, _, exchanges = programs(**case)
    for direction in ("forward", "backward"):
        steps = [getattr(exchange, direction) for exchange in exchanges]
        assert len({len(own) for own in steps}) == 1
        for at_once in zip(*steps, strict=True):
            sent = [
                (r, m.peer, m.what, m.source, m.part or 0, m.rows)
                for r, step in enumerate(at_once)
                for m in step.sends
            ]
            got = [
                (m.peer, r, m.what, m.source, m.part or 0, m.rows)
                for r, step in enumerate(at_once)
                for m in step.receives
            ]
            assert sorted(sent) == sorted(got)


@settings(max_examples=100, deadline=None)
@given(**{name: CASES[name] for name in CASES if name not in ("transport", "options")})
def test_the_ring_returns_each_gradient_row_once_per_hop(**case):
    _, _, exchanges = programs(**case, transport="ring")
    for exchange in exchanges:
        home = [m for step in exchange.backward for m in step.receives if m[:2] == ("grad", exchange.rank)]
        first_hop = [m for m in exchange.forward[0].sends if m.source == exchange.rank]
        assert sum(size(m.rows) for m in home) == sum(size(m.rows) for m in first_hop)
    total = {what: sum(x.rows_sent(x.backward, what) for x in exchanges) for what in ("kv", "grad")}
    assert total["kv"] == total["grad"] == sum(x.rows_sent(x.forward, "kv") for x in exchanges)


def test_ring_bytes_of_dense_causal_attention_are_the_closed_form():
    cp, tokens = 4, 64
    exchanges = programs([tokens], None, False, cp, "contiguous", "ring")[2]
    for exchange in exchanges:
        local = tokens // cp
        assert exchange.rows_sent(exchange.forward, "kv") == (cp - 1) * local
        # 3 K/V heads, 5 + 2 elements of a row, 2 bytes there and 4 bytes back.
        assert exchange.bytes_sent(Heads(6, 3, 5, 2, 2, 4)) == (2 * 2 + 4) * (cp - 1) * local * 21


def test_contiguous_causal_ring_sends_nothing_where_nobody_needs_it():
    exchanges = programs([64], None, True, 4, "contiguous", "ring")[2]
    assert [x.rows_sent(x.forward, "kv") for x in exchanges] == [16, 32, 48, 0]


def test_documents_on_single_ranks_need_no_message():
    for transport in ("ring", "all_gather", "needed"):
        exchanges = programs([16, 16, 16, 16], None, True, 4, "contiguous", transport)[2]
        assert all(x.rounds == 0 and x.bytes_sent(Heads(1, 1, 1, 1, 1, 1)) == 0 for x in exchanges)


def test_a_window_needs_only_its_halo():
    for transport in ("ring", "needed"):
        exchanges = programs([64], 5, True, 4, "contiguous", transport)[2]
        assert [x.rows_sent(x.forward, "kv") for x in exchanges] == [4, 4, 4, 0]


@settings(max_examples=100, deadline=None)
@given(**{name: CASES[name] for name in CASES if name not in ("transport", "options")})
def test_needed_rows_are_those_that_some_query_sees_and_no_other(**case):
    mask, sharding, exchanges = programs(**case, transport="needed", options=Options(stages=3))
    seen = visible(mask)
    for rank, exchange in enumerate(exchanges):
        own = sharding.index(rank)
        others = np.setdiff1d(np.arange(mask.tokens), own)
        wanted = int(seen[np.ix_(own, others)].any(0).sum()) if len(own) else 0
        moves = [m for step in exchange.forward for m in step.receives]
        assert sum(size(m.rows) for m in moves) == wanted
        home = [m for step in exchange.backward for m in step.sends if m.what == "grad"]
        assert sum(size(m.rows) for m in home) == wanted


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_heads_are_dealt_with_the_key_heads_they_use(kv, group, slices):
    query = kv * group
    if slices > query:
        with pytest.raises(ConfigError, match=f"cannot deal {query} query heads into {slices} parts"):
            slice_heads(query, kv, slices)
        return
    parts = slice_heads(query, kv, slices)
    assert [head for part in parts for head in range(part.start, part.stop)] == list(range(query))
    for part in parts:
        own, rest = divmod(part.query, len(part.kv))
        assert rest == 0
        used = [part.kv[place // own] for place in range(part.query)]
        assert used == [head // group for head in range(part.start, part.stop)]
    assert max(part.query for part in parts) - min(part.query for part in parts) <= 1


@given(st.integers(0, 200), st.integers(1, 90), st.integers(0, 200), st.integers(1, 90), st.integers(1, 200))
def test_cut_covers_a_rectangle(q_start, queries, k_start, keys, window):
    count = np.zeros((queries, keys), dtype=int)
    for block in cut(q_start, q_start + queries, k_start, k_start + keys, Band(0, window - 1)):
        rows = slice(block.q_start - q_start, block.q_stop - q_start)
        count[rows, block.k_start - k_start : block.k_stop - k_start] += block_pairs(block)
    distance = np.arange(q_start, q_start + queries)[:, None] - np.arange(k_start, k_start + keys)[None]
    assert (count == ((distance >= 0) & (distance < window))).all()


def test_refusals():
    mask = Mask((0, 8))
    with pytest.raises(ConfigError, match="8 tokens"):
        build(mask, Sharding.contiguous(9, 2), 0)
    with pytest.raises(ConfigError, match="carrier"):
        build(mask, Sharding.contiguous(8, 2), 0, "carrier")
    with pytest.raises(ConfigError, match="groups of 3 ranks do not divide cp=2"):
        build(mask, Sharding.contiguous(8, 2), 0, "all_to_all+ring", Options(inner=3))
    with pytest.raises(ConfigError, match="stages must be at least 1"):
        Options(stages=0)
