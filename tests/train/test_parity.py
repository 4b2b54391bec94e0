"""Every mix of tp, sp, cp and dp computes the same loss and gradients as one process."""

import itertools

import pytest

from longspan.testing import run_ranks
from tests.train.parity import BATCHES, MODELS, parity_cell

LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"cp_inner": 2}, {"dp_replicate": 2}],
    4: [
        {"tp": 4},
        {"tp": 4, "sp": True},
        {"cp_inner": 4},
        {"tp": 2, "cp_inner": 2},
        {"tp": 2, "sp": True, "cp_inner": 2},
        {"cp_outer": 2, "cp_inner": 2},
        {"dp_replicate": 2, "cp_inner": 2},
    ],
    8: [
        {"tp": 4, "sp": True, "cp_inner": 2},
        {"tp": 2, "cp_inner": 4},
        {"tp": 2, "sp": True, "cp_outer": 2, "cp_inner": 2},
        {"dp_replicate": 2, "tp": 2, "sp": True, "cp_inner": 2},
        {"cp_inner": 8},
    ],
}
EXCHANGES = [
    ("zigzag", "ring"),
    ("document_zigzag", "all_gather"),
    ("contiguous", "ring"),
    ("zigzag", "all_gather"),
]
GRID = [
    (world, sizes, model, batch, *exchange)
    for world, layouts in LAYOUTS.items()
    for sizes, model, batch, exchange in itertools.product(layouts, MODELS, BATCHES, EXCHANGES)
]


def name(cell) -> str:
    world, sizes, *rest = cell
    layout = ",".join(key if size is True else f"{key}={size}" for key, size in sizes.items())
    return "-".join([f"w{world}", layout or "one", *rest])


def check(cell, record_property, **options):
    world, *arguments = cell
    loss_error, gradient_error = run_ranks(parity_cell, world, *arguments, **options)[0]
    record_property("worst_error", gradient_error)
    assert loss_error <= 1e-12
    assert gradient_error <= 1e-10


@pytest.mark.grid
@pytest.mark.parametrize("cell", GRID, ids=name)
def test_grid(cell, record_property):
    check(cell, record_property)


@pytest.mark.parametrize("cell", GRID[::13], ids=name)
def test_cover(cell, record_property):
    check(cell, record_property)
