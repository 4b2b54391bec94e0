"""One attention call over cp ranks beside dense attention in one process."""

from typing import NamedTuple

import numpy as np
import torch

from longspan.attention import AttentionCall, Meter, Score, attend, choose_kernel
from longspan.spec.exchange import Exchange, Heads, Options, build, inner_size
from longspan.spec.mask import Mask
from longspan.spec.sharding import deal
from longspan.testing import cached_mesh
from tests.attention.reference import dense_attention

DOCUMENTS = {
    "one": [97],
    "packed": [37, 5, 1, 22, 1, 31],
    "two_rows": [40, 24, 10, 53, 1],
    "dust": [1, 1, 2, 1, 1],
}
MASKS = {"causal": (True, None), "window": (True, 7), "wide_window": (True, 65), "full": (False, None)}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "odd": (6, 3)}
DIM = 8


class Cell(NamedTuple):
    """What is computed, and how it is shared."""

    documents: str
    mask: str
    heads: str
    sharding: str
    transport: str
    kernel: str = "cpu_flash"
    options: Options = Options()
    dtype: torch.dtype = torch.float64
    softcap: float | None = None
    sinks: bool = False
    v_dim: int = DIM
    grad_dtype: torch.dtype | None = None


class Outcome(NamedTuple):
    """What one rank saw.

    Attributes:
        error: worst relative error of output and gradients.
        bytes_off: bytes counted in the collectives, less the closed form.
        pairs_off: pairs counted at the kernel, less the program's.
        rounds_off: posts counted, less the program's.
        pairs: (query, key, head) triples of the program.
        kv_square_error: summed squares of the error of this rank's dK and dV.
    """

    error: float
    bytes_off: int
    pairs_off: int
    rounds_off: int
    pairs: int
    kv_square_error: float


def bounds_of(cell: Cell) -> tuple[int, ...]:
    return (0, *np.cumsum(DOCUMENTS[cell.documents]).tolist())


def program(cell: Cell, rank: int, world: int) -> tuple[torch.Tensor, Exchange]:
    """Token numbers of one rank, and its program."""
    inner = inner_size(cell.transport, world, cell.options)
    rows = 2 if cell.documents == "two_rows" else 1
    dealt = deal(cell.sharding, bounds_of(cell), rows, world, inner)
    mask = Mask(bounds_of(cell), *MASKS[cell.mask])
    return torch.from_numpy(dealt.index(rank)), build(mask, dealt, rank, cell.transport, cell.options)


def whole_tensors(cell: Cell) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and sinks of all tokens in float64, and the gradient of the output."""
    tokens, (query, kv) = sum(DOCUMENTS[cell.documents]), HEADS[cell.heads]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [draw(tokens, query, DIM), draw(tokens, kv, DIM), draw(tokens, kv, cell.v_dim), draw(query)]
    return [t.requires_grad_() for t in tensors], draw(tokens, query, cell.v_dim)


def run_cell(rank: int, world: int, cell: Cell) -> Outcome:
    """Compare output and every gradient, and counters with closed forms."""
    (q, k, v, sinks), grad = whole_tensors(cell)
    lengths, (causal, window) = DOCUMENTS[cell.documents], MASKS[cell.mask]
    expected = dense_attention(q, k, v, lengths, causal, window, cell.softcap, sinks if cell.sinks else None)
    expected.backward(grad)

    index, exchange = program(cell, rank, world)
    local = [t.detach()[index].to(cell.dtype).requires_grad_() for t in (q, k, v)]
    own_sinks = sinks.detach().clone().requires_grad_() if cell.sinks else None
    meter, score = Meter(), Score(DIM**-0.5, cell.softcap)
    inner = inner_size(cell.transport, world, cell.options)
    mesh = cached_mesh((world // inner, inner), ("outer", "inner"))
    call = AttentionCall(
        exchange=exchange,
        kernel=choose_kernel(cell.kernel, "cpu", cell.dtype, score),
        score=score,
        meter=meter,
        sequence=mesh.get_group("outer"),
        heads=mesh.get_group("inner"),
        grad_dtype=cell.grad_dtype,
    )
    out = attend(*local, call, own_sinks)
    pairs = meter.pairs
    out.backward(grad[index].to(cell.dtype))

    compared = [(out, expected.detach()[index], expected)]
    compared += [(a.grad, b.grad[index], b.grad) for a, b in zip(local, (q, k, v), strict=True)]
    if own_sinks is not None:
        torch.distributed.all_reduce(own_sinks.grad)
        compared.append((own_sinks.grad, sinks.grad, sinks.grad))
    errors = [
        float((a.double() - b).abs().max() / whole.abs().max()) if len(b) else 0.0
        for a, b, whole in ((a.detach(), b, whole.detach()) for a, b, whole in compared)
    ]
    query, kv = HEADS[cell.heads]
    wide = cell.grad_dtype or torch.promote_types(cell.dtype, torch.float32)
    heads = Heads(query, kv, DIM, cell.v_dim, cell.dtype.itemsize, wide.itemsize)
    planned = exchange.pairs_of(query, kv)
    return Outcome(
        max(errors),
        meter.sent_bytes - exchange.bytes_sent(heads),
        pairs - planned,
        meter.rounds - exchange.rounds,
        planned,
        sum(float((a.grad - b.grad[index]).square().sum()) for a, b in zip(local[1:], (k, v), strict=True)),
    )
