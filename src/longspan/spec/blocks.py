"""Cutting a banded rectangle of attention scores into tiles that every fused kernel computes exactly.

Kernels agree on three shapes only: a full rectangle, a causal square and (flipped) an anticausal square. Causal with
unequal sides is aligned top-left by some and bottom-right by others, so it is never handed to one. Bands narrower than
`NARROW` would fall into very many tiny squares and go to a kernel as one tile with an explicit mask instead.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from longspan.spec.mask import Band

Shape = Literal["full", "causal", "anticausal", "band"]

NARROW = 64


class Block(NamedTuple):
    """One kernel call: queries [q_start, q_stop) against keys [k_start, k_stop).

    Query i and key j, both counted from the block's corner, form a pair if
    full: always; causal: j <= i; anticausal: j >= i; band: lowest <= i - j <= highest.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    shape: Shape
    lowest: int = 0
    highest: int = 0

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the block needs."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        if self.shape == "full":
            return queries * keys
        if self.shape in ("causal", "anticausal"):
            return queries * (queries + 1) // 2
        seen = (min(keys, i - self.lowest + 1) - max(0, i - self.highest) for i in range(queries))
        return sum(max(0, n) for n in seen)

    def moved(self, q_shift: int, k_shift: int) -> "Block":
        """The same block with other row numbers."""
        return self._replace(
            q_start=self.q_start + q_shift,
            q_stop=self.q_stop + q_shift,
            k_start=self.k_start + k_shift,
            k_stop=self.k_stop + k_shift,
        )


def cut(q_start: int, q_stop: int, k_start: int, k_stop: int, band: Band) -> Iterator[Block]:
    """Yield the blocks that hold exactly the pairs of a rectangle allowed by `band`; no block has an unseen row.

    Positions are those of the flattened row, queries and keys inside one document.
    """
    lowest, highest = band
    if lowest is not None:
        q_start, k_stop = max(q_start, k_start + lowest), min(k_stop, q_stop - lowest)
    if highest is not None:
        q_stop, k_start = min(q_stop, k_stop + highest), max(k_start, q_start - highest)
    if q_start >= q_stop or k_start >= k_stop:
        return
    # A bound that every pair of the rectangle keeps is no bound.
    if lowest is not None and q_start - (k_stop - 1) >= lowest:
        lowest = None
    if highest is not None and (q_stop - 1) - k_start <= highest:
        highest = None
    if lowest is None and highest is None:
        yield Block(q_start, q_stop, k_start, k_stop, "full")
    elif highest is None:
        yield from _cut_causal(q_start, q_stop, k_start, k_stop, lowest or 0)
    elif lowest is None:
        yield from _cut_anticausal(q_start, q_stop, k_start, k_stop, highest)
    elif highest - lowest < NARROW:
        yield from _cut_narrow(q_start, q_stop, k_start, k_stop, lowest, highest)
    else:
        yield from _cut_wide(q_start, q_stop, k_start, k_stop, lowest, highest)


def _cut_causal(q_start: int, q_stop: int, k_start: int, k_stop: int, lowest: int) -> Iterator[Block]:
    """Queries see keys up to their own position minus `lowest`: earlier keys, a square on the diagonal, later rows."""
    corner = q_start - lowest
    if k_start < corner:
        yield Block(q_start, q_stop, k_start, corner, "full")
    side = k_stop - corner
    yield Block(q_start, q_start + side, corner, k_stop, "causal")
    if q_start + side < q_stop:
        yield Block(q_start + side, q_stop, corner, k_stop, "full")


def _cut_anticausal(q_start: int, q_stop: int, k_start: int, k_stop: int, highest: int) -> Iterator[Block]:
    """Queries see keys from their own position minus `highest` on: the mirror image of the causal cut."""
    corner = k_start + highest
    if q_start < corner:
        yield Block(q_start, corner, k_start, k_stop, "full")
    side = q_stop - corner
    yield Block(corner, q_stop, k_start, k_start + side, "anticausal")
    if k_start + side < k_stop:
        yield Block(corner, q_stop, k_start + side, k_stop, "full")


def _cut_wide(
    q_start: int, q_stop: int, k_start: int, k_stop: int, lowest: int, highest: int
) -> Iterator[Block]:
    """Both edges cross: row tiles as high as the band, each with one edge on either side of its first diagonal."""
    band = Band(lowest, highest)
    height = highest - lowest + 1
    for top in range(q_start, q_stop, height):
        bottom, middle = min(top + height, q_stop), min(max(k_start, top - lowest), k_stop)
        yield from cut(top, bottom, k_start, middle, band)
        yield from cut(top, bottom, middle, k_stop, band)


def _cut_narrow(
    q_start: int, q_stop: int, k_start: int, k_stop: int, lowest: int, highest: int
) -> Iterator[Block]:
    """Row tiles of `NARROW` queries, each with the few keys around its diagonal and an explicit mask."""
    for top in range(q_start, q_stop, NARROW):
        bottom = min(top + NARROW, q_stop)
        left, right = max(k_start, top - highest), min(k_stop, bottom - lowest)
        shift = top - left
        yield Block(top, bottom, left, right, "band", lowest - shift, highest - shift)
