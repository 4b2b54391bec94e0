"""The cover that `make test` runs in place of whole grids."""

import itertools

from tests.pairwise import _pairs, pairwise


def test_every_pair_is_covered_by_few_cells():
    grid = list(itertools.product("abc", range(4), [True, False], "xy"))
    cover = pairwise(grid)
    assert set().union(*map(_pairs, cover)) == set().union(*map(_pairs, grid))
    assert len(cover) <= 16 < len(grid)


def test_only_pairs_that_the_grid_has():
    assert pairwise([(1, 1), (2, 2)]) == [(1, 1), (2, 2)]
