"""Which context-parallel rank owns which tokens of the flattened row.

Any length is dealt without padding: pieces differ by at most one token. Zigzag pairs an early with a late piece of
each span so that causal work is even (the head-tail balance of Megatron-LM and Llama 3 training, arXiv 2407.21783).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import ConfigError


@dataclass(frozen=True)
class Sharding:
    """For each cp rank its token ranges [start, stop) of the flattened row, in local order.

    Raises:
        ConfigError: ranges that do not cover every token exactly once.
    """

    segments: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        """Refuse a deal that loses or repeats a token."""
        pieces = sorted(piece for rank in self.segments for piece in rank)
        stops = [0, *(stop for _, stop in pieces)]
        if any(start >= stop for start, stop in pieces) or [start for start, _ in pieces] != stops[:-1]:
            raise ConfigError(f"sharding must deal every token to one rank exactly once, got {pieces[:8]}")

    @property
    def cp(self) -> int:
        """Number of ranks dealt to."""
        return len(self.segments)

    @cached_property
    def tokens(self) -> int:
        """Length T of the flattened row."""
        return sum(self.num_tokens(rank) for rank in range(self.cp))

    def num_tokens(self, rank: int) -> int:
        """Tokens that `rank` owns."""
        return sum(stop - start for start, stop in self.segments[rank])

    def index(self, rank: int) -> np.ndarray:
        """Positions in the flattened row of the tokens that `rank` owns, int64, shape (t,)."""
        pieces = [np.arange(start, stop, dtype=np.int64) for start, stop in self.segments[rank]]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def grouped(self, size: int) -> "Sharding":
        """The same tokens dealt to groups of `size` neighbouring ranks, in the order of their members."""
        starts = range(0, self.cp, size)
        return Sharding(
            tuple(_pieces([p for rank in self.segments[at : at + size] for p in rank]) for at in starts)
        )

    def split(self, size: int) -> "Sharding":
        """Each rank's tokens dealt to `size` neighbours in equal stretches of their local order."""
        ranks = []
        for rank, segments in enumerate(self.segments):
            tokens = self.num_tokens(rank)
            edges = [tokens * member // size for member in range(size + 1)]
            ranks += [_stretch(segments, start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
        return Sharding(tuple(ranks))

    @classmethod
    def contiguous(cls, tokens: int, cp: int) -> "Sharding":
        """One equal stretch of the flattened row for each rank."""
        edges = [tokens * rank // cp for rank in range(cp + 1)]
        return cls(tuple(_pieces([(edges[r], edges[r + 1])]) for r in range(cp)))

    @classmethod
    def zigzag(cls, spans: Sequence[int], cp: int) -> "Sharding":
        """Cut each span into 2·cp pieces and give rank r pieces r and 2·cp-1-r of every one.

        Args:
            spans: span starts and the end, rising from 0: row borders (`zigzag`) or document bounds
                (`document_zigzag`).
            cp: number of ranks.
        """
        owned: list[list[tuple[int, int]]] = [[] for _ in range(cp)]
        counts = [0] * cp
        for start, stop in zip(spans, spans[1:], strict=False):
            edges = _edges(start, stop, counts)
            for piece in range(2 * cp):
                rank = min(piece, 2 * cp - 1 - piece)
                owned[rank].append((edges[piece], edges[piece + 1]))
                counts[rank] += edges[piece + 1] - edges[piece]
        return cls(tuple(_pieces(pieces) for pieces in owned))


def _edges(start: int, stop: int, counts: list[int]) -> list[int]:
    """Bounds of 2·cp near-equal pieces; spare tokens go to the ranks that own least so far."""
    cp = len(counts)
    base, spare = divmod(stop - start, 2 * cp)
    sizes = [base] * (2 * cp)
    by_need = sorted(range(cp), key=lambda rank: (counts[rank], rank))
    early_then_late = [rank for rank in by_need] + [2 * cp - 1 - rank for rank in by_need]
    for piece in early_then_late[:spare]:
        sizes[piece] += 1
    return [start, *(start + int(total) for total in np.cumsum(sizes))]


def _stretch(segments: Iterable[tuple[int, int]], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Tokens [start, stop), counted in the order of the segments."""
    found, before = [], 0
    for first, last in segments:
        found.append((max(first, first + start - before), min(last, first + stop - before)))
        before += last - first
    return _pieces([(a, b) for a, b in found if a < b])


def _pieces(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Drop empty pieces and join those that touch."""
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def deal(kind: str, cu_seqlens: Sequence[int], rows: int, cp: int, inner: int = 1) -> Sharding:
    """The sharding that a run file names.

    Args:
        kind: "contiguous", "zigzag" (balanced inside each row) or "document_zigzag" (inside each document).
        cu_seqlens: document starts and the end T over the flattened rows.
        rows: number of equal rows that were flattened.
        cp: number of ranks.
        inner: neighbouring ranks that trade heads and so compute on each other's tokens. What they own together is
            dealt to each group as to one rank, and inside it in equal stretches.

    Raises:
        ConfigError: another kind.
    """
    tokens, groups = cu_seqlens[-1], cp // inner
    if kind == "contiguous":
        dealt = Sharding.contiguous(tokens, groups)
    elif kind == "zigzag":
        dealt = Sharding.zigzag([tokens // rows * row for row in range(rows)] + [tokens], groups)
    elif kind == "document_zigzag":
        dealt = Sharding.zigzag(cu_seqlens, groups)
    else:
        raise ConfigError(f"unknown sharding {kind!r}; use contiguous, zigzag or document_zigzag")
    return dealt.split(inner) if inner > 1 else dealt
