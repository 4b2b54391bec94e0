"""Attention over cp ranks equals dense attention in one process: outputs, every gradient, bytes and pairs."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from longspan.attention import AttentionCall, Meter, attend, choose_kernel
from longspan.spec.exchange import Exchange
from longspan.spec.mask import Mask
from longspan.spec.sharding import deal
from longspan.testing import run_ranks
from tests.attention.reference import dense_attention

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
    row = 2 * num_kv * 8
    wide = torch.promote_types(dtype, torch.float32)
    closed = exchange.bytes_sent(row * dtype.itemsize, row * wide.itemsize)
    return max(errors), meter.sent_bytes - closed, pairs - exchange.pairs, exchange.pairs


def check(world, cell, tolerance=1e-10, **options):
    results = run_ranks(parity_cell, world, *cell, **options)
    errors, bytes_off, pairs_off, pairs = (list(column) for column in zip(*results, strict=True))
    assert max(errors) <= tolerance, errors
    assert not any(bytes_off) and not any(pairs_off)
    bounds = (0, *np.cumsum(DOCUMENTS[cell[0]]).tolist())
    assert sum(pairs) == Mask(bounds, *MASKS[cell[1]]).pairs()


GRID = list(itertools.product(DOCUMENTS, MASKS, HEADS, SHARDINGS, TRANSPORTS, KERNELS))


@pytest.mark.grid
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("cell", GRID, ids="-".join)
def test_grid(world, cell):
    check(world, cell)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("cell", GRID[::7], ids="-".join)
def test_cover(world, cell):
    check(world, cell)
