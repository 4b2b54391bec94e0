"""Exchange: the frozen program of one attention call on one cp rank, forward and backward.

A program is a sequence of steps. Each step first posts its moves (rows sent and received), then computes its blocks
on rows already held while the moves are in flight, then waits for them. The engine executes the program as it stands;
bytes, rounds and pairs are read off the same value.

The ring (arXiv 2310.01889, blockwise attention over a ring of hosts) passes K and V to the next rank in one message.
Rows that no later rank of the ring needs are dropped from the message, and a message without rows is not sent.
In backward K and V travel the same way; the gradient of a row starts at the first rank that used it, is passed on
and added to, and goes straight home from the last, so it makes exactly as many hops as the row did, each of them hidden
under a block computation. The all-gather (arXiv 2407.21783, section 3.3) moves all needed rows in one
collective, does not keep them for backward, and returns gradients by one reduce-scatter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from longspan.errors import ConfigError
from longspan.spec.blocks import Block, cut
from longspan.spec.mask import Mask
from longspan.spec.ranges import Ranges, difference, intersection, locate, size, union
from longspan.spec.sharding import Sharding

Transport = Literal["ring", "all_gather"]


class Move(NamedTuple):
    """One message: K/V rows, or the gradients of K/V rows, of `source`'s shard, to or from `peer` (cp ranks)."""

    what: Literal["kv", "grad"]
    source: int
    peer: int
    rows: Ranges


class Work(NamedTuple):
    """Blocks against the rows of one source; block key numbers count inside the buffer that holds `rows`."""

    source: int
    rows: Ranges
    blocks: tuple[Block, ...]


class Step(NamedTuple):
    """Moves that are posted together, and the work that hides them."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Exchange:
    """What one rank sends, receives and computes for one attention call.

    Attributes:
        transport: how the moves of a step are carried.
        rank: this rank's place in the cp group.
        num_rows: tokens that each cp rank owns.
        padded_rows: for collectives that need equal parts, the rows of the largest part; 0 for the ring.
        forward: steps of the forward pass.
        backward: steps of the backward pass.
    """

    transport: Transport
    rank: int
    num_rows: tuple[int, ...]
    padded_rows: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @classmethod
    def build(cls, mask: Mask, sharding: Sharding, rank: int, transport: Transport = "ring") -> "Exchange":
        """Write the program of `rank` for one mask under one sharding.

        Raises:
            ConfigError: mask and sharding of different lengths, or an unknown transport.
        """
        return cls._programs(mask, sharding, (rank,), transport)[0]

    @classmethod
    def build_all(
        cls, mask: Mask, sharding: Sharding, transport: Transport = "ring"
    ) -> "tuple[Exchange, ...]":
        """The programs of all ranks, to compare or to draw them; raises what `build` raises."""
        return cls._programs(mask, sharding, range(sharding.cp), transport)

    @classmethod
    def _programs(
        cls, mask: Mask, sharding: Sharding, ranks: Iterable[int], transport: Transport
    ) -> "tuple[Exchange, ...]":
        if mask.tokens != sharding.tokens:
            raise ConfigError(f"the mask covers {mask.tokens} tokens, the sharding {sharding.tokens}")
        if transport not in ("ring", "all_gather"):
            raise ConfigError(f"unknown transport {transport!r}; use ring or all_gather")
        needs = _Needs(mask, sharding)
        build = _ring if transport == "ring" else _all_gather
        num_rows = tuple(needs.num_rows)
        return tuple(cls(transport, rank, num_rows, *build(needs, rank)) for rank in ranks)

    @property
    def cp(self) -> int:
        """Size of the cp group."""
        return len(self.num_rows)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes in one forward pass and one head."""
        return sum(block.pairs for step in self.forward for work in step.work for block in work.blocks)

    def rows_sent(self, steps: tuple[Step, ...], what: str) -> int:
        """K/V rows (`what="kv"`) or gradient rows (`"grad"`) that this rank hands to the transport in `steps`."""
        moves = [move for step in steps for move in step.sends if move.what == what]
        if self.transport == "all_gather":
            return self.padded_rows * len(moves)
        return sum(size(move.rows) for move in moves)

    def bytes_sent(self, kv_row_bytes: int, grad_row_bytes: int) -> int:
        """Payload bytes that this rank sends for one forward and backward pass.

        Args:
            kv_row_bytes: bytes of one token's K and V over all local heads, on the wire.
            grad_row_bytes: bytes of one token's dK and dV.
        """
        kv_rows = self.rows_sent(self.forward, "kv") + self.rows_sent(self.backward, "kv")
        return kv_rows * kv_row_bytes + self.rows_sent(self.backward, "grad") * grad_row_bytes

    @property
    def rounds(self) -> int:
        """Steps of forward and backward in which this rank sends or receives."""
        return sum(bool(step.sends or step.receives) for step in self.forward + self.backward)


class _Needs:
    """Which rows of each source each rank needs, and the blocks it computes on them."""

    def __init__(self, mask: Mask, sharding: Sharding) -> None:
        self.mask, self.cp = mask, sharding.cp
        self.pieces = [_pieces_by_document(mask, segments) for segments in sharding.segments]
        self.num_rows = [sharding.num_tokens(rank) for rank in range(self.cp)]
        self._rows = [
            [self._rows_needed(rank, source) for source in range(self.cp)] for rank in range(self.cp)
        ]

    def everything(self, source: int) -> Ranges:
        """All rows of a source."""
        return union([(0, self.num_rows[source])])

    def rows(self, rank: int, source: int) -> Ranges:
        """Rows of `source`, counted in its shard, that `rank` attends to."""
        return self._rows[rank][source]

    def rows_of_any(self, ranks: Iterable[int], source: int) -> Ranges:
        """Rows of `source` that at least one of `ranks` attends to."""
        return union(piece for rank in ranks for piece in self._rows[rank][source])

    def _rows_needed(self, rank: int, source: int) -> Ranges:
        needed: list[tuple[int, int]] = []
        for document, queries in self.pieces[rank].items():
            keys = self.pieces[source].get(document)
            if not keys:
                continue
            seen = union(self.mask.key_range(document, start, stop) for start, stop, _ in queries)
            for start, stop, row in keys:
                needed += [
                    (a - start + row, b - start + row) for a, b in intersection(seen, ((start, stop),))
                ]
        return union(needed)

    def work(self, rank: int, source: int, held: Ranges) -> Work:
        """Blocks of `rank`'s queries against the rows `held` of `source`."""
        blocks = []
        for document, queries in self.pieces[rank].items():
            for k_start, k_stop, k_row in self.pieces[source].get(document, ()):
                for q_start, q_stop, q_row in queries:
                    for block in cut(q_start, q_stop, k_start, k_stop, self.mask.band):
                        blocks.append(block.moved(q_row - q_start, k_row - k_start))
        return Work(source, held, tuple(_joined(_renumbered(block, held) for block in blocks)))


def _pieces_by_document(mask: Mask, segments: Ranges) -> dict[int, list[tuple[int, int, int]]]:
    """Split a rank's segments at document bounds: document -> [(start, stop, local row of start), ...]."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for start, stop in segments:
        document = int(mask.bounds.searchsorted(start, side="right")) - 1
        while start < stop:
            end = min(stop, mask.cu_seqlens[document + 1])
            pieces.setdefault(document, []).append((start, end, row))
            row, start, document = row + end - start, end, document + 1
    return pieces


def _renumbered(block: Block, held: Ranges) -> Block:
    """Count the block's keys in the buffer that holds `held`."""
    ((start, _),) = locate(((block.k_start, block.k_stop),), held)
    return block.moved(0, start - block.k_start)


def _joined(blocks: Iterable[Block]) -> list[Block]:
    """Join full blocks that stand side by side or one above the other: fewer, larger kernel calls."""
    wide: list[Block] = []
    for block in sorted(blocks, key=lambda b: (b.q_start, b.q_stop, b.k_start)):
        last = wide[-1] if wide else None
        if last and _both_full(last, block) and last[:2] == block[:2] and last.k_stop == block.k_start:
            wide[-1] = last._replace(k_stop=block.k_stop)
        else:
            wide.append(block)
    tall: list[Block] = []
    for block in sorted(wide, key=lambda b: (b.k_start, b.k_stop, b.q_start)):
        last = tall[-1] if tall else None
        if last and _both_full(last, block) and last[2:4] == block[2:4] and last.q_stop == block.q_start:
            tall[-1] = last._replace(q_stop=block.q_stop)
        else:
            tall.append(block)
    return tall


def _both_full(left: Block, right: Block) -> bool:
    return left.shape == right.shape == "full"


def _ring(needs: _Needs, rank: int) -> tuple[int, tuple[Step, ...], tuple[Step, ...]]:
    """Programs of the ring: step h works on the rows of the source h places before this rank."""
    cp = needs.cp

    @cache
    def travelling(source: int, hop: int) -> Ranges:
        """Rows of `source` that reach the rank `hop` places after it, for itself or for a rank further on."""
        if hop == 0:
            return needs.everything(source)
        return needs.rows_of_any([(source + h) % cp for h in range(hop, cp)], source)

    sources = [(rank - hop) % cp for hop in range(cp)]
    work = [needs.work(rank, source, travelling(source, hop)) for hop, source in enumerate(sources)]
    kv_sends = [_moves("kv", s, (rank + 1) % cp, travelling(s, hop + 1)) for hop, s in enumerate(sources)]
    kv_receives = [
        _moves("kv", (s - 1) % cp, (rank - 1) % cp, travelling((s - 1) % cp, hop + 1))
        for hop, s in enumerate(sources)
    ]
    forward = tuple(
        Step(kv_sends[hop], kv_receives[hop], _unless_empty(work[hop], hop > 0)) for hop in range(cp)
    )
    first, last = _halves(work[0])
    stages = [(first,), *((w,) if w.rows else () for w in work[1:]), (last,)]
    backward = []
    for hop in range(cp + 1):
        grads_out, grads_in = _gradient_moves(rank, hop, cp, travelling)
        kv_out, kv_in = (kv_sends[hop], kv_receives[hop]) if hop < cp else ((), ())
        backward.append(Step(kv_out + grads_out, kv_in + grads_in, stages[hop]))
    return 0, forward, tuple(backward)


def _gradient_moves(
    rank: int, hop: int, cp: int, travelling: Callable[[int, int], Ranges]
) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """Gradients that leave and reach `rank` at the start of backward step `hop`, computed in step `hop` - 1."""
    before = hop - 1
    if before < 1:
        return (), ()
    source, incoming = (rank - before) % cp, (rank - hop) % cp
    onward, next_in = travelling(source, hop), travelling(incoming, hop)
    home = difference(travelling(source, before), onward)
    returning = difference(travelling(rank, before), travelling(rank, hop))
    sends = _moves("grad", source, (rank + 1) % cp, onward) + _moves("grad", source, source, home)
    receives = _moves("grad", incoming, (rank - 1) % cp, next_in) + _moves(
        "grad", rank, (rank + before) % cp, returning
    )
    return sends, receives


def _all_gather(needs: _Needs, rank: int) -> tuple[int, tuple[Step, ...], tuple[Step, ...]]:
    """Programs of the all-gather: own blocks while the rows arrive, then all other blocks."""
    others = [source for source in range(needs.cp) if source != rank]
    shared = [needs.rows_of_any([r for r in range(needs.cp) if r != s], s) for s in range(needs.cp)]
    padded_rows = max(size(rows) for rows in shared)
    local = needs.work(rank, rank, needs.everything(rank))
    if not padded_rows:
        step = Step((), (), _unless_empty(local, False))
        return 0, (step,), (step,)
    kv_out = tuple(Move("kv", rank, peer, shared[rank]) for peer in others)
    kv_in = tuple(Move("kv", source, source, shared[source]) for source in others)
    remote = tuple(needs.work(rank, source, shared[source]) for source in others)
    grads_out = tuple(Move("grad", source, source, shared[source]) for source in others)
    grads_in = tuple(Move("grad", rank, peer, shared[rank]) for peer in others)
    forward = (Step(kv_out, kv_in, (local,)), Step((), (), remote))
    first, last = _halves(local)
    backward = (Step(kv_out, kv_in, (first,)), Step((), (), remote), Step(grads_out, grads_in, (last,)))
    return padded_rows, forward, backward


def _moves(what: Literal["kv", "grad"], source: int, peer: int, rows: Ranges) -> tuple[Move, ...]:
    return (Move(what, source, peer, rows),) if rows else ()


def _unless_empty(work: Work, drop: bool) -> tuple[Work, ...]:
    return () if drop and not work.blocks else (work,)


def _halves(work: Work) -> tuple[Work, Work]:
    """Split own work in two parts of about equal pairs: one hides the first messages, one the last."""
    total, done, first = sum(b.pairs for b in work.blocks), 0, 0
    for block in work.blocks:
        if 2 * done + block.pairs > total and first:
            break
        done, first = done + block.pairs, first + 1
    return work._replace(blocks=work.blocks[:first]), work._replace(blocks=work.blocks[first:])
