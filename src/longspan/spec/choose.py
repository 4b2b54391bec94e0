"""Choosing how context parallelism deals tokens and moves keys, with the figures that decided.

Shardings are compared by exact attention pairs (the busiest rank sets the pace) and by rows that must move; transports
by rows and rounds. The figures are counted on one real micro-batch, not modelled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from longspan.spec.exchange import DEFAULT, Exchange, Options, Transport, build_all, inner_size
from longspan.spec.mask import Mask
from longspan.spec.sharding import deal

__all__ = ["Candidate", "Choice", "choose"]

SHARDINGS = ("contiguous", "zigzag", "document_zigzag")
TRANSPORTS: tuple[Transport, ...] = ("ring", "all_gather", "needed")
# Pair imbalances closer than this count as equal; then fewer rows win.
EQUAL_IMBALANCE = 0.02


@dataclass(frozen=True)
class Candidate:
    """One sharding with one transport on one micro-batch, all layers together.

    Attributes:
        sharding: kind of token placement.
        transport: how rows move.
        imbalance: most pairs of any rank ÷ mean pairs.
        rows_sent: K/V and gradient rows that the busiest rank sends, forward and backward.
        rounds: posts of messages of the busiest rank.
    """

    sharding: str
    transport: Transport
    imbalance: float
    rows_sent: int
    rounds: int


@dataclass(frozen=True)
class Choice:
    """What was chosen and why, with all that was compared."""

    chosen: Candidate
    reason: str
    candidates: tuple[Candidate, ...]


def choose(
    sharding: str,
    transport: Transport | Literal["auto"],
    layers: Mapping[Mask, int],
    rows: int,
    cp: int,
    options: Options = DEFAULT,
) -> Choice:
    """Choose sharding and transport where the run says "auto"; otherwise take what it says.

    Args:
        sharding: "auto" or a kind.
        transport: "auto" or a kind.
        layers: masks of one micro-batch and the number of layers with each.
        rows: rows of the micro-batch.
        cp: ranks that share them.
        options: settings of the transport.
    """
    shardings = SHARDINGS if sharding == "auto" else (sharding,)
    transports = TRANSPORTS if transport == "auto" else (transport,)
    candidates = tuple(_candidate(s, t, layers, rows, cp, options) for s in shardings for t in transports)
    least = min(c.imbalance for c in candidates)
    even = [c for c in candidates if c.imbalance <= least + EQUAL_IMBALANCE]
    chosen = min(even, key=lambda c: (c.rows_sent, c.rounds))
    inner = inner_size(chosen.transport, cp, options)
    return Choice(chosen, _reason(chosen, candidates, cp, inner), candidates)


def _candidate(
    sharding: str, transport: Transport, layers: Mapping[Mask, int], rows: int, cp: int, options: Options
) -> Candidate:
    inner = inner_size(transport, cp, options)
    pairs, sent, rounds = [0] * cp, [0] * cp, [0] * cp
    for mask, count in layers.items():
        dealt = deal(sharding, mask.cu_seqlens, rows, cp, inner)
        for rank, program in enumerate(build_all(mask, dealt, transport, options)):
            pairs[rank] += count * program.pairs
            sent[rank] += count * _rows(program)
            rounds[rank] += count * program.rounds
    return Candidate(sharding, transport, max(pairs) * cp / sum(pairs), max(sent), max(rounds))


def _rows(program: Exchange) -> int:
    """K/V and gradient rows of all heads sent, forward and backward."""
    kv = program.rows_sent(program.forward, "kv") + program.rows_sent(program.backward, "kv")
    return kv + program.rows_sent(program.backward, "grad")


def _reason(chosen: Candidate, candidates: tuple[Candidate, ...], cp: int, inner: int) -> str:
    if cp == 1:
        return "cp is 1: nothing is shared"
    figures = (
        f"pairs of the busiest rank {chosen.imbalance:.2f} × the mean, "
        f"{chosen.rows_sent:,} K/V rows sent a micro-batch"
    )
    if inner > 1:
        figures += f" beside the trade of tokens for heads among {inner} ranks"
    if len(candidates) == 1:
        return f"as the run file says; {figures}"
    return f"most even of {len(candidates)}, then fewest rows and rounds: {figures}"
