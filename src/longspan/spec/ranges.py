"""Sets of integers as sorted, disjoint, non-touching half-open ranges: the rows that a message carries."""

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge any ranges into sorted disjoint ones; empty ones vanish."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def difference(left: Ranges, right: Ranges) -> Ranges:
    """Rows of `left` that are not in `right`."""
    kept: list[tuple[int, int]] = []
    for start, stop in left:
        for cut_start, cut_stop in right:
            if cut_stop <= start or cut_start >= stop:
                continue
            kept.append((start, cut_start))
            start = cut_stop
        kept.append((start, stop))
    return tuple(r for r in kept if r[0] < r[1])


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Rows in both."""
    return difference(left, difference(left, right))


def size(ranges: Ranges) -> int:
    """Number of rows."""
    return sum(stop - start for start, stop in ranges)


def locate(ranges: Ranges, held: Ranges) -> Ranges:
    """Where `ranges`, a subset of `held`, lie in a buffer that stores the rows of `held` one after another.

    Raises:
        ValueError: a row of `ranges` is not in `held`.
    """
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        offset = 0
        for held_start, held_stop in held:
            if held_start <= start and stop <= held_stop:
                found.append((start - held_start + offset, stop - held_start + offset))
                break
            offset += held_stop - held_start
        else:
            raise ValueError(f"rows [{start}, {stop}) are not among the held rows {held}")
    return tuple(found)
