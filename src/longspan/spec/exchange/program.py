"""Exchange: the frozen program of one attention call on one rank, forward and backward.

A program is a sequence of steps. Each step first posts its moves (rows sent and received), then computes its blocks
on rows already held while the moves are in flight, then waits for them. The engine executes the program as it stands;
bytes, rounds and pairs are read off the same value.

Around the steps, an optional `Reshard` trades tokens for heads inside a group of ranks; the steps are then those of
the whole group, taken by each of its ranks on its own heads.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from longspan.spec.blocks import Block
from longspan.spec.exchange.heads import Heads, HeadSlice, Reshard, kv_part
from longspan.spec.ranges import Ranges, size

Content = Literal["kv", "grad"]


class Move(NamedTuple):
    """One message: K/V rows, or the gradients of K/V rows, of `source`'s shard, to or from `peer`.

    Both count inside the group that the steps run in. `part` is a group of K/V heads; None means all heads.
    """

    what: Content
    source: int
    peer: int
    rows: Ranges
    part: int | None = None


class Work(NamedTuple):
    """Blocks against the rows of one source; block key numbers count inside the buffer that holds `rows`."""

    source: int
    rows: Ranges
    blocks: tuple[Block, ...]
    part: int | None = None


class Step(NamedTuple):
    """Moves that are posted together, and the work that hides them."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Exchange:
    """What one rank sends, receives and computes for one attention call.

    Attributes:
        transport: name of the transport that wrote the program.
        rank: this rank's place in the group that the steps run in.
        num_rows: tokens that each member of that group has.
        padded_rows: rows of every part of a collective; 0 where rows travel in messages between two ranks.
        forward: steps of the forward pass.
        backward: steps of the backward pass.
        parts: groups of K/V heads that the steps' moves tell apart.
        reshard: the trade of tokens for heads around the steps, or None.
    """

    transport: str
    rank: int
    num_rows: tuple[int, ...]
    padded_rows: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    parts: int = 1
    reshard: Reshard | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank's q, k and v."""
        return self.reshard.num_rows[self.reshard.rank] if self.reshard else self.num_rows[self.rank]

    def head_slices(self, query: int, kv: int) -> tuple[HeadSlice, ...]:
        """The heads that this rank computes, one slice for each time that it runs the steps."""
        if self.reshard is None:
            return (HeadSlice(0, query, tuple(range(kv))),)
        return tuple(chunk[self.reshard.rank] for chunk in self.reshard.deal(query, kv))

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one forward pass over the steps, for one head."""
        works = [work for step in self.forward for work in step.work if not work.part]
        return sum(block.pairs for work in works for block in work.blocks)

    def pairs_of(self, query: int, kv: int) -> int:
        """(query, key, query head) triples that this rank computes in one forward pass."""
        return self.pairs * sum(part.query for part in self.head_slices(query, kv))

    def rows_sent(self, steps: tuple[Step, ...], what: str) -> int:
        """K/V rows (`what="kv"`) or gradient rows (`"grad"`) with all their heads that the moves of `steps` send."""
        moves = [move for step in steps for move in step.sends if move.what == what and not move.part]
        return sum(self.padded_rows or size(move.rows) for move in moves)

    def forward_bytes(self, heads: Heads) -> int:
        """Payload bytes that this rank sends in one forward pass."""
        return self._moved(self.forward, heads) + (self.reshard.forward_bytes(heads) if self.reshard else 0)

    def backward_bytes(self, heads: Heads) -> int:
        """Payload bytes that this rank sends in one backward pass."""
        return self._moved(self.backward, heads) + (self.reshard.backward_bytes(heads) if self.reshard else 0)

    def bytes_sent(self, heads: Heads) -> int:
        """Payload bytes that this rank sends in one forward and one backward pass."""
        return self.forward_bytes(heads) + self.backward_bytes(heads)

    def _moved(self, steps: tuple[Step, ...], heads: Heads) -> int:
        itemsize = {"kv": heads.itemsize, "grad": heads.grad_itemsize}
        kv_heads = [len(part.kv) for part in self.head_slices(heads.query, heads.kv)]
        total = 0
        for move in (move for step in steps for move in step.sends):
            rows = self.padded_rows or size(move.rows)
            own = [kv_part(count, move.part, self.parts) for count in kv_heads]
            total += rows * sum(part.stop - part.start for part in own) * heads.kv_row * itemsize[move.what]
        return total

    @property
    def rounds(self) -> int:
        """Times in one forward and backward pass that this rank posts moves or trades heads."""
        posts = sum(bool(step.sends or step.receives) for step in self.forward + self.backward)
        if self.reshard is None:
            return posts
        return self.reshard.chunks * (posts + 4)
