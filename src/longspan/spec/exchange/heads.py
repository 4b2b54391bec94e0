"""Heads of one attention call, and the trade of tokens for heads inside a group of ranks.

In the all-to-all over heads (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1) every rank of a group gives away the
heads it will not compute and receives the group's tokens of those it will. Query heads are dealt out in stretches.
A K/V head goes to every rank that has a query head of its own for it, so fewer K/V heads than ranks, or a number
that the ranks do not divide, is no special case: such heads are sent more than once, and their gradients are summed.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from longspan.errors import ConfigError


class Heads(NamedTuple):
    """Heads of one attention call on a rank before any exchange, and the bytes of their elements.

    Attributes:
        query: query heads, a multiple of `kv`.
        kv: key/value heads.
        dim: head size of queries and keys.
        v_dim: head size of values.
        itemsize: bytes of an element of q, k, v and of finished gradients.
        grad_itemsize: bytes of an element of partial gradients, which other ranks add to.
    """

    query: int
    kv: int
    dim: int
    v_dim: int
    itemsize: int
    grad_itemsize: int

    @property
    def kv_row(self) -> int:
        """Elements of one token's K and V in one head."""
        return self.dim + self.v_dim


class HeadSlice(NamedTuple):
    """Query heads [start, stop), and the K/V heads they use, each for equally many of them and in their order."""

    start: int
    stop: int
    kv: tuple[int, ...]

    @property
    def query(self) -> int:
        """Number of query heads."""
        return self.stop - self.start


def slice_heads(query: int, kv: int, slices: int) -> tuple[HeadSlice, ...]:
    """Cut heads into stretches of near-equal size.

    Args:
        query: query heads, a multiple of `kv`.
        kv: key/value heads.
        slices: number of stretches.

    Raises:
        ConfigError: more slices than query heads.
    """
    if slices > query:
        raise ConfigError(
            f"an all-to-all over heads cannot deal {query} query heads into {slices} parts; use fewer ranks inside"
        )
    group = query // kv
    edges = [query * i // slices for i in range(slices + 1)]
    found = []
    for start, stop in zip(edges, edges[1:], strict=False):
        shared = gcd(group, start, stop)
        found.append(HeadSlice(start, stop, tuple(head // group for head in range(start, stop, shared))))
    return tuple(found)


def kv_part(kv_heads: int, part: int | None, parts: int) -> slice:
    """K/V heads of one of several groups of heads; None means all."""
    if part is None:
        return slice(0, kv_heads)
    return slice(kv_heads * part // parts, kv_heads * (part + 1) // parts)


@dataclass(frozen=True)
class Reshard:
    """The trade inside one group: before it a rank has all heads of its tokens, after it some heads of all tokens.

    The group's tokens follow each other in the order of its ranks.

    Attributes:
        rank: this rank's place in the group.
        num_rows: tokens of each member.
        chunks: times that heads are dealt out, one part after the other, so that one chunk travels while another
            is computed.
    """

    rank: int
    num_rows: tuple[int, ...]
    chunks: int = 1

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.num_rows)

    def deal(self, query: int, kv: int) -> tuple[tuple[HeadSlice, ...], ...]:
        """For each chunk the slice of every rank."""
        slices = slice_heads(query, kv, self.chunks * self.size)
        return tuple(slices[at : at + self.size] for at in range(0, len(slices), self.size))

    def repeats(self, query: int, kv: int) -> bool:
        """Whether some K/V head goes to several slices, so that its gradients must be summed."""
        return sum(len(part.kv) for chunk in self.deal(query, kv) for part in chunk) > kv

    def forward_bytes(self, heads: Heads) -> int:
        """Bytes of q, k and v that this rank sends out, and of the output it sends back."""
        there = sum(self.num_rows[self.rank] * _inputs(part, heads) for part in self._others(heads))
        back = sum(self._other_rows * part.query * heads.v_dim for part in self._own(heads))
        return (there + back) * heads.itemsize

    def backward_bytes(self, heads: Heads) -> int:
        """Bytes of the output's gradient that this rank sends out, and of the gradients it sends back."""
        rows = self.num_rows[self.rank]
        there = sum(rows * part.query * heads.v_dim for part in self._others(heads)) * heads.itemsize
        back = sum(self._other_rows * _inputs(part, heads) for part in self._own(heads))
        return there + back * (heads.grad_itemsize if self.repeats(heads.query, heads.kv) else heads.itemsize)

    @property
    def _other_rows(self) -> int:
        return sum(self.num_rows) - self.num_rows[self.rank]

    def _own(self, heads: Heads) -> list[HeadSlice]:
        return [chunk[self.rank] for chunk in self.deal(heads.query, heads.kv)]

    def _others(self, heads: Heads) -> list[HeadSlice]:
        chunks = self.deal(heads.query, heads.kv)
        return [part for chunk in chunks for rank, part in enumerate(chunk) if rank != self.rank]


def _inputs(part: HeadSlice, heads: Heads) -> int:
    """Elements of q, k and v of one token in one slice of the heads."""
    return part.query * heads.dim + len(part.kv) * heads.kv_row
