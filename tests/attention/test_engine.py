"""Attention over cp ranks equals dense attention in one process: outputs, every gradient, bytes and pairs."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from longspan.attention import AttentionCall, Meter, attend, choose_kernel
from longspan.errors import UnsupportedError
from longspan.spec.exchange import Exchange
from longspan.spec.mask import Mask
from longspan.spec.sharding import deal
from longspan.testing import run_ranks
from tests.attention.reference import dense_attention
from tests.pairwise import pairwise

DOCUMENTS = {
    "one": [97],
    "packed": [37, 5, 1, 22, 1, 31],
    "two_rows": [40, 24, 10, 53, 1],
    "dust": [1, 1, 2, 1, 1],
}
MASKS = {"causal": (True, None), "window": (True, 7), "wide_window": (True, 65), "full": (False, None)}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
KERNELS = ("cpu_flash", "reference")
TRANSPORTS = ("ring", "all_gather")
SHARDINGS = ("contiguous", "zigzag", "document_zigzag")


def parity_cell(rank, world, documents, mask, heads, sharding, transport, kernel, dtype=torch.float64):
    """Worst relative errors of output and gradients, plus counted against closed-form bytes and pairs."""
    lengths, (causal, window), (num_heads, num_kv) = DOCUMENTS[documents], MASKS[mask], HEADS[heads]
    tokens, rows = sum(lengths), 2 if documents == "two_rows" else 1
    bounds = (0, *np.cumsum(lengths).tolist())
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(tokens, h, 8, generator=generator, dtype=torch.float64)
        for h in (num_heads, num_kv, num_kv)
    ]
    grad = torch.randn(tokens, num_heads, 8, generator=generator, dtype=torch.float64)
    whole = [t.requires_grad_() for t in whole]
    expected = dense_attention(*whole, lengths, causal, window)
    expected.backward(grad)

    dealt = deal(sharding, bounds, rows, world)
    exchange = Exchange.build(Mask(bounds, causal, window), dealt, rank, transport)
    index, meter = torch.from_numpy(dealt.index(rank)), Meter()
    local = [t.detach()[index].to(dtype).requires_grad_() for t in whole]
    call = AttentionCall(exchange, dist.group.WORLD, choose_kernel(kernel, "cpu", dtype), 8**-0.5, meter)
    out = attend(*local, call)
    pairs = meter.pairs
    out.backward(grad[index].to(dtype))

    compared = [(out, expected.detach()), *((a.grad, b.grad) for a, b in zip(local, whole, strict=True))]
    errors = [
        float((a.double() - b[index]).abs().max() / b.abs().max()) if len(index) else 0.0 for a, b in compared
    ]
    row, wide = 2 * num_kv * 8, torch.promote_types(dtype, torch.float32)
    closed = exchange.bytes_sent(row * dtype.itemsize, row * wide.itemsize)
    return max(errors), meter.sent_bytes - closed, pairs - exchange.pairs, exchange.pairs


def check(cell, record_property):
    world, *arguments = cell
    results = run_ranks(parity_cell, world, *arguments)
    errors, bytes_off, pairs_off, pairs = (list(column) for column in zip(*results, strict=True))
    record_property("worst_error", max(errors))
    assert max(errors) <= 1e-10, errors
    assert not any(bytes_off) and not any(pairs_off)
    documents, mask, *_ = arguments
    bounds = (0, *np.cumsum(DOCUMENTS[documents]).tolist())
    assert sum(pairs) == Mask(bounds, *MASKS[mask]).pairs()


WORLDS = (1, 2, 3, 4, 8)
GRID = list(itertools.product(WORLDS, DOCUMENTS, MASKS, HEADS, SHARDINGS, TRANSPORTS, KERNELS))


def name(cell) -> str:
    return "-".join(map(str, cell))


@pytest.mark.grid
@pytest.mark.parametrize("cell", GRID, ids=name)
def test_grid(cell, record_property):
    check(cell, record_property)


COVER = [cell for world in WORLDS for cell in pairwise([cell for cell in GRID if cell[0] == world])]


@pytest.mark.parametrize("cell", COVER, ids=name)
def test_cover(cell, record_property):
    check(cell, record_property)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mask", ["causal", "wide_window"])
def test_errors_in_narrow_dtypes_do_not_grow_with_the_world(mask, transport, dtype):
    cell = ("packed", mask, "gqa", "zigzag", transport, "cpu_flash", dtype)
    alone, *shared = (max(error for error, *_ in run_ranks(parity_cell, n, *cell)) for n in (1, 2, 4, 8))
    assert max(shared) <= 2 * alone


def refused(rank, world, change):
    """The message with which attention refuses tensors that do not fit its program."""
    exchange = Exchange.build(Mask((0, 8)), deal("zigzag", (0, 8), 1, world), rank)
    shapes = {"q": (4, 4, 8), "k": (4, 2, 8), "v": (4, 2, 8)} | change
    tensors = [torch.zeros(shapes[name]) for name in "qkv"]
    call = AttentionCall(exchange, None, choose_kernel("auto", "cpu", torch.float32), 1.0, Meter())
    try:
        attend(*tensors, call)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (5, 4, 8)}, "this rank owns 4"),
        ({"k": (3, 2, 8)}, "this rank owns 4"),
        ({"q": (4, 3, 8)}, "no multiple of 2 key heads"),
        ({"v": (4, 2, 6)}, "equal head sizes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, words):
    assert words in run_ranks(refused, 2, change)[0]


def test_kernels_refuse_by_name():
    with pytest.raises(UnsupportedError, match="unknown kernel 'xformers'"):
        choose_kernel("xformers", "cpu", torch.float32)
    with pytest.raises(UnsupportedError, match="cuda_flash runs on cuda"):
        choose_kernel("cuda_flash", "cpu", torch.float32)
