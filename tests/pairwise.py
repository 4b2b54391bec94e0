"""A small cover of a grid: every pair of settings that the grid has together stands in at least one chosen cell."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(cells: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A greedy choice of cells, in the order of the grid; the same every time."""
    pairs = [_pairs(cell) for cell in cells]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cells)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [cells[index] for index in sorted(chosen)]


def _pairs(cell: tuple[Any, ...]) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(((place, repr(value)) for place, value in enumerate(cell)), 2))
