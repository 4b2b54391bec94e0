"""Training on one row shared by single-threaded processes, beside one process with as many threads.

`python -m benchmarks.context --world 2 --tokens 8192`: both take optimizer steps on the same model and row in turns.
That is the price of context parallelism on a machine that one process could use up alone. Losses are compared before
the clock runs.
"""

import sys
from dataclasses import asdict, replace
from functools import cache, partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from cyclopts import Parameter

from benchmarks.harness import (
    RATIO_COLUMNS,
    Columns,
    Pair,
    Plan,
    cell,
    environment,
    markdown,
    over_ranks,
    ratios,
    run_command,
    save,
    say,
    time_pairs,
)
from benchmarks.loops import Case, Ours
from longspan.errors import LongspanError
from longspan.spec.layout import Layout
from longspan.testing import run_ranks
from longspan.train.groups import Groups

STEPS_COMPARED = 3
TOLERANCE = 1e-5
HOURS_S = 7200.0

CASE, PLAN = Case(tokens=8192), Plan()


def main(
    *,
    case: Annotated[Case, Parameter(name="*")] = CASE,
    plan: Plan = PLAN,
    world: int = 2,
    vocabulary: int = 512,
    fsdp: Annotated[bool, Parameter(negative=())] = False,
    steps: int = 1,
) -> None:
    """Time training with context parallelism over processes, and in one process with as many threads.

    Args:
        case: what is trained.
        plan: how it is measured.
        world: Processes that share the row, and threads of the one process.
        vocabulary: Vocabulary size.
        fsdp: Share out the weights over the processes too.
        steps: Optimizer steps in each timed piece.
    """
    case = replace(case, device="cpu", threads=world)
    noise = plan.noise()
    layout = Layout(cp_inner=world, fsdp=fsdp or None)
    say(f"{world} processes beside one with {world} threads: {plan.pairs} pairs")
    measured = run_ranks(measure, world, case, vocabulary, layout, plan, steps, timeout_s=HOURS_S)
    difference = max(error for error, _ in measured)
    pairs = over_ranks([pairs for _, pairs in measured])
    config = asdict(case) | {
        "cp": world,
        "sp": False,
        "fsdp": fsdp,
        "vocabulary": vocabulary,
        "steps_a_piece": steps,
    }
    row = figures(pairs, case.tokens * steps) | {
        "loss_difference": difference,
        "config": config,
        "environment": environment("cpu"),
        "noise": noise,
    }
    title = f"Training, cp {world} × 1 thread beside 1 process × {world} threads, {case.tokens:,} tokens"
    stem = f"context_cpu_{world}_{case.tokens}{'_fsdp' if fsdp else ''}"
    save(stem, row, markdown(title, [row], COLUMNS), plan, noise)


def measure(
    rank: int, world: int, case: Case, vocabulary: int, layout: Layout, plan: Plan, steps: int
) -> tuple[float, list[Pair]]:
    """Compare the first losses, then time steps of all ranks and, in turns, of rank 0 alone."""
    shared, alone = Ours(case, vocabulary, _groups(layout)), Ours(case, vocabulary)
    losses = [(_step(shared, 1), _step(alone, world)) for _ in range(STEPS_COMPARED)]
    difference = max(abs(ours - theirs) / theirs for ours, theirs in losses)
    if difference > TOLERANCE:
        raise LongspanError(f"losses differ by {difference:.1e}; nothing was timed")
    side = partial(_many, shared, 1, steps)
    # Only one rank computes the yardstick, while the others wait without computing.
    yardstick = partial(_many, alone, world, steps) if rank == 0 else _nothing
    return difference, time_pairs(side, yardstick, plan, barrier=dist.barrier)


@cache
def _groups(layout: Layout) -> Groups:
    return Groups.create(layout)


def _many(loop: Ours, threads: int, steps: int) -> None:
    for _ in range(steps):
        _step(loop, threads)


def _step(loop: Ours, threads: int) -> float:
    torch.set_num_threads(threads)
    return loop.step()


def _nothing() -> None:
    pass


def figures(pairs: list[Pair], tokens: int) -> dict[str, Any]:
    """The figures of a case: the side is all ranks, the yardstick one process.

    Args:
        pairs: timed pairs of the whole world.
        tokens: tokens of one timed piece.
    """
    return {
        "cp_tokens_per_s": tokens / median(pair.side.wall_s for pair in pairs),
        "one_process_tokens_per_s": tokens / median(pair.yardstick.wall_s for pair in pairs),
    } | ratios(pairs, lambda pair: pair.yardstick.wall_s / pair.side.wall_s)


COLUMNS: Columns = {
    "cp tokens/s": cell("cp_tokens_per_s", ",.0f"),
    "one process tokens/s": cell("one_process_tokens_per_s", ",.0f"),
    **RATIO_COLUMNS,
    "loss difference": cell("loss_difference", ".0e"),
}

if __name__ == "__main__":
    sys.exit(run_command(main))
