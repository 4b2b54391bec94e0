"""Attention over cp ranks equals dense attention in one process: outputs, every gradient, bytes and pairs."""

import itertools

import pytest
import torch

from longspan.attention import AttentionCall, Meter, Score, attend, choose_kernel
from longspan.errors import UnsupportedError
from longspan.spec.exchange import DEFAULT, Options, build
from longspan.spec.mask import Mask
from longspan.spec.sharding import deal
from longspan.testing import run_ranks
from tests.attention.cells import DOCUMENTS, HEADS, MASKS, Cell, bounds_of, run_cell
from tests.pairwise import pairwise

KERNELS = ("cpu_flash", "reference")
SHARDINGS = ("contiguous", "zigzag", "document_zigzag")
# Transports with their settings; those of two levels have two or more groups of two ranks, or two of four.
FLAT = {
    "ring": ("ring", Options()),
    "ring_direct": ("ring", Options(direct_gradients=True)),
    "all_gather": ("all_gather", Options()),
    "needed": ("needed", Options()),
    "needed_at_once": ("needed", Options(stages=1)),
    "all_to_all": ("all_to_all", Options()),
}
TWO_LEVEL = {
    f"all_to_all+{outer}": (f"all_to_all+{outer}", Options(inner=2))
    for outer in ("ring", "all_gather", "needed")
}
WIDE_INNER = {"all_to_all_4+ring": ("all_to_all+ring", Options(inner=4))}
TRANSPORTS = {1: FLAT, 2: FLAT, 4: FLAT | TWO_LEVEL, 8: TWO_LEVEL | WIDE_INNER}

GRID = [
    (world, Cell(documents, mask, heads, sharding, transport, kernel, options))
    for world, transports in TRANSPORTS.items()
    for documents, mask, heads, sharding, (transport, options), kernel in itertools.product(
        DOCUMENTS, MASKS, HEADS, SHARDINGS, transports.values(), KERNELS
    )
]


def name(cell) -> str:
    world, what = cell
    options = ",".join(f"{k}={v}" for k, v in vars(what.options).items() if v != getattr(Options(), k))
    return "-".join([str(world), *what[:6], *([options] if options else [])])


def check(cell, record_property):
    world, what = cell
    outcomes = run_ranks(run_cell, world, what)
    record_property("worst_error", max(outcome.error for outcome in outcomes))
    assert max(outcome.error for outcome in outcomes) <= 1e-10, outcomes
    assert not any(outcome.bytes_off or outcome.pairs_off or outcome.rounds_off for outcome in outcomes), (
        outcomes
    )
    mask = Mask(bounds_of(what), *MASKS[what.mask])
    assert sum(outcome.pairs for outcome in outcomes) == mask.pairs() * HEADS[what.heads][0]


@pytest.mark.grid
@pytest.mark.parametrize("cell", GRID, ids=name)
def test_grid(cell, record_property):
    check(cell, record_property)


COVER = [(world, cell) for world in TRANSPORTS for cell in pairwise([what for w, what in GRID if w == world])]


@pytest.mark.parametrize("cell", COVER, ids=name)
def test_cover(cell, record_property):
    check(cell, record_property)


HEAD_GROUPS = [
    (
        world,
        Cell(
            "packed", mask, heads, "zigzag", transport, "cpu_flash", Options(inner=inner, head_groups=groups)
        ),
    )
    for world, transport, inner in [
        (2, "all_gather", 1),
        (4, "all_gather", 1),
        (2, "all_to_all", 1),
        (4, "all_to_all+ring", 2),
    ]
    for mask in ("causal", "window")
    for heads, groups in [("mha", 2), ("gqa", 2), ("odd", 3)]
    if transport == "all_gather" or HEADS[heads][0] >= groups * 2
]


@pytest.mark.parametrize("cell", HEAD_GROUPS, ids=name)
def test_heads_in_groups(cell, record_property):
    check(cell, record_property)


@pytest.mark.parametrize(
    "transport", [("ring", 1), ("all_gather", 1), ("needed", 1), ("all_to_all", 1), ("all_to_all+ring", 2)]
)
@pytest.mark.parametrize(
    "score",
    [
        {"softcap": 2.0},
        {"sinks": True},
        {"v_dim": 5},
        {"v_dim": 12},
        {"softcap": 1.5, "sinks": True, "v_dim": 5},
    ],
    ids=str,
)
def test_more_than_scaled_softmax(transport, score, record_property):
    kind, inner = transport
    cell = Cell("packed", "causal", "gqa", "zigzag", kind, "auto", Options(inner=inner))._replace(**score)
    check((4, cell), record_property)


NARROW = [
    ("ring", Options(), None),
    ("ring", Options(direct_gradients=True), torch.bfloat16),
    ("all_gather", Options(), None),
    ("all_gather", Options(), torch.bfloat16),
    ("needed", Options(), None),
    ("needed", Options(), torch.bfloat16),
    ("all_to_all", Options(), None),
    ("all_to_all", Options(), torch.bfloat16),
]


# A wire narrower than the inputs is the user's choice of error.
NARROW_CELLS = [(torch.bfloat16, transport) for transport in NARROW] + [
    (torch.float32, transport) for transport in NARROW if transport[2] is None
]


@pytest.mark.parametrize(("dtype", "transport"), NARROW_CELLS, ids=str)
@pytest.mark.parametrize("mask", ["causal", "wide_window"])
def test_errors_in_narrow_dtypes_do_not_grow_with_the_world(mask, dtype, transport):
    kind, options, wire = transport
    cell = Cell("packed", mask, "gqa", "zigzag", kind, "cpu_flash", options, dtype, grad_dtype=wire)
    worlds = (1, 2, 4) if kind == "all_to_all" else (1, 2, 4, 8)
    alone, *shared = (max(o.error for o in run_ranks(run_cell, n, cell)) for n in worlds)
    assert max(shared) <= 2 * alone


@pytest.mark.parametrize("transport", ["ring_direct", "all_gather", "needed"])
def test_a_narrow_wire_rounds_each_part_once(transport):
    def error(world, kind, options):
        cell = Cell("one", "full", "gqa", "contiguous", kind, "cpu_flash", options, torch.float32)
        outcomes = run_ranks(run_cell, world, cell._replace(grad_dtype=torch.bfloat16))
        return sum(outcome.kv_square_error for outcome in outcomes) ** 0.5

    straight = error(8, *FLAT[transport])
    # Of cp parts of equal size, cp - 1 are rounded: squares of the error grow as (cp - 1) / cp, from 1/2 to below 1.
    assert straight <= 2**0.5 * error(2, *FLAT[transport])
    # Sums rounded at every hop: as (1 + 2 + ... + (cp - 1)) / cp, here 4 times as much, so twice the error.
    assert error(8, *FLAT["ring"]) > 1.5 * straight


def refused(rank, world, change, transport="ring", options=DEFAULT):
    """The message with which attention refuses tensors that do not fit its program."""
    exchange = build(Mask((0, 8)), deal("zigzag", (0, 8), 1, world), rank, transport, options)
    shapes = {"q": (4, 4, 8), "k": (4, 2, 8), "v": (4, 2, 8)} | change
    tensors = [torch.zeros(shapes[name]) for name in "qkv"]
    sinks = torch.zeros(change["sinks"]) if "sinks" in change else None
    call = AttentionCall(
        exchange=exchange, kernel=choose_kernel("auto", "cpu", torch.float32), score=Score(1.0), meter=Meter()
    )
    try:
        attend(*tensors, call, sinks)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (5, 4, 8)}, "this rank owns 4"),
        ({"k": (3, 2, 8)}, "this rank owns 4"),
        ({"q": (4, 3, 8)}, "no multiple of 2 key heads"),
        ({"sinks": (3,)}, "there are 4 query heads"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, words):
    assert words in run_ranks(refused, 2, change)[0]


def test_more_groups_of_heads_than_heads_are_refused():
    words = run_ranks(refused, 2, {}, "all_gather", Options(head_groups=3))[0]
    assert "head_groups=3 are more than the 2 key/value heads" in words


def test_kernels_refuse_by_name():
    with pytest.raises(UnsupportedError, match="unknown kernel 'xformers'"):
        choose_kernel("xformers", "cpu", torch.float32)
    with pytest.raises(UnsupportedError, match="cuda_flash runs on cuda"):
        choose_kernel("cuda_flash", "cpu", torch.float32)
