"""Which rows of each source each rank needs, and the blocks it computes on them."""

from collections.abc import Iterable

from longspan.spec.blocks import Block, cut
from longspan.spec.exchange.program import Work
from longspan.spec.mask import Mask
from longspan.spec.ranges import Ranges, intersection, locate, union
from longspan.spec.sharding import Sharding


class Needs:
    """What a mask asks of a sharding: exact rows, and blocks over them; the same on every rank.

    Args:
        mask: which keys each query sees.
        sharding: which rank owns which tokens.
    """

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


def halves(work: Work) -> tuple[Work, Work]:
    """Split own work in two parts of about equal pairs: one hides the first messages, one the last."""
    total, done, first = sum(b.pairs for b in work.blocks), 0, 0
    for block in work.blocks:
        if 2 * done + block.pairs > total and first:
            break
        done, first = done + block.pairs, first + 1
    return work._replace(blocks=work.blocks[:first]), work._replace(blocks=work.blocks[first:])
