"""What every rank does in a timing of attention: try a side, time it beside the yardstick, or profile it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Pair, Plan, time_pairs
from benchmarks.sides import WHOLE, Attend, Case, Place, Side, sdpa
from longspan.spec.sharding import deal

Run = Callable[[], list[Tensor]]
"""Gives the output and, if they are computed, the gradients of q, k and v."""


@dataclass(frozen=True)
class Measured:
    """One rank's findings.

    Attributes:
        error: largest difference to the yardstick on this rank's tokens, in parts of the tensor's largest value.
        pairs: timed pairs.
    """

    error: float
    pairs: list[Pair]


def measure(rank: int, world: int, case: Case, side: Side, backward: bool, plan: Plan) -> Measured:
    """Check this rank's part of a side against the yardstick, then time both in turns.

    Args:
        rank: this rank.
        world: number of ranks.
        case: what is computed.
        side: how.
        backward: run the backward pass too.
        plan: how many pairs; none only checks.
    """
    place = Place.of(rank, case.device)
    whole, index_t = case.whole(), _index(case, side, rank)
    yardstick = _runner(sdpa, whole, backward)
    run = _runner(side.build(case, place), tuple(x[index_t] for x in whole), backward)
    error = max(_error(ours, ideal[index_t]) for ours, ideal in zip(run(), yardstick(), strict=True))
    # Only one rank computes the yardstick, while the others wait without computing.
    alone = yardstick if rank == 0 else _nothing
    return Measured(error, time_pairs(run, alone, plan, case.device, partial(dist.barrier, place.meeting)))


def profile(rank: int, world: int, case: Case, side: Side, backward: bool, repeats: int) -> str:
    """Where this rank's time goes, operator by operator."""
    place = Place.of(rank, case.device)
    part = tuple(x[_index(case, side, rank)] for x in case.whole())
    run = _runner(side.build(case, place), part, backward)
    run()
    dist.barrier(place.meeting)
    with torch.profiler.profile() as profiler:
        for _ in range(repeats):
            run()
    order = "self_cpu_time_total" if case.device == "cpu" else "self_device_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)


def _index(case: Case, side: Side, rank: int) -> Tensor:
    if side.sharding == WHOLE:
        return torch.arange(case.sequence, device=case.device)
    sharding = deal(side.sharding, (0, case.sequence), 1, case.world)
    return torch.from_numpy(sharding.index(rank)).to(case.device)


def _runner(attend: Attend, tensors: tuple[Tensor, ...], backward: bool) -> Run:
    """Forward, or forward and backward, of one rank."""
    *qkv, grad_out = tensors
    leaves = [x.detach().requires_grad_(backward) for x in qkv]

    def run() -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            out = attend(*leaves)
        return [out, *(torch.autograd.grad(out, leaves, grad_out) if backward else ())]

    return run


def _error(ours: Tensor, ideal: Tensor) -> float:
    return ((ours - ideal).abs().max() / ideal.abs().max()).item()


def _nothing() -> None:
    pass
