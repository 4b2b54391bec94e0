"""Every mix of tp, sp, cp and dp computes the same loss and gradients as one process."""

import itertools

import pytest
import torch

from longspan.testing import run_ranks
from tests.pairwise import pairwise
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


# Where one process happens to be right to the last digits, the layout may still be off by a few roundings.
FLOAT32_ROUNDINGS = 4


def name(cell) -> str:
    world, sizes, *rest = cell
    layout = ",".join(key if size is True else f"{key}={size}" for key, size in sizes.items())
    return "-".join([f"w{world}", layout or "one", *rest])


def check(cell, record_property):
    world, *arguments = cell
    wide, narrow, narrow_alone = run_ranks(parity_cell, world, *arguments)[0]
    record_property("worst_error", wide[1])
    assert wide[0] <= 1e-12
    assert wide[1] <= 1e-10
    for error, alone in zip(narrow, narrow_alone, strict=True):
        assert error <= 2 * max(alone, FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps)


@pytest.mark.grid
@pytest.mark.parametrize("cell", GRID, ids=name)
def test_grid(cell, record_property):
    check(cell, record_property)


@pytest.mark.parametrize("cell", pairwise(GRID), ids=name)
def test_cover(cell, record_property):
    check(cell, record_property)
