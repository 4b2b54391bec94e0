"""A training step with an asynchronous save beside it, and the same step without.

`python -m benchmarks.saving --world 2 --tokens 8192`: one timed step begins with a save, the copy of weights and
optimizer state included, and its files are written while the step computes; the other saves nothing. What is left of a
save when its step is over is awaited before the next piece, off the clock.
"""

import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
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
from longspan.spec.layout import Layout
from longspan.testing import run_ranks
from longspan.train.checkpoint.manifest import Manifest, Progress
from longspan.train.checkpoint.state import RunTensors
from longspan.train.checkpoint.together import Together
from longspan.train.checkpoint.writing import Writer
from longspan.train.groups import Groups

HOURS_S = 7200.0

CASE, PLAN = Case(tokens=8192), Plan()


def main(
    *,
    case: Annotated[Case, Parameter(name="*")] = CASE,
    plan: Plan = PLAN,
    world: int = 2,
    vocabulary: int = 512,
    folder: Path | None = None,
) -> None:
    """Time training steps with and without a save beside them.

    Args:
        case: what is trained.
        plan: how it is measured.
        world: Single-threaded processes that share the row.
        vocabulary: Vocabulary size.
        folder: Where the checkpoints go; a temporary folder when left out.
    """
    case = replace(case, device="cpu", threads=1)
    noise = plan.noise()
    say(f"{world} processes, with and without a save: {plan.pairs} pairs")
    with tempfile.TemporaryDirectory(dir=folder, prefix="longspan-saving-") as place:
        measured = run_ranks(measure, world, case, vocabulary, plan, place, timeout_s=HOURS_S)
    pairs = over_ranks([pairs for pairs, _, _ in measured])
    row = figures(pairs) | {
        "checkpoint_bytes": measured[0][1],
        "save_s": max(median(seconds) for _, _, seconds in measured),
        "config": asdict(case) | {"cp": world, "sp": False, "vocabulary": vocabulary, "saves_a_step": 1},
        "environment": environment("cpu"),
        "noise": noise,
    }
    title = f"A step with an asynchronous save, cp {world}, {case.tokens:,} tokens"
    save(f"saving_cpu_{world}_{case.tokens}", row, markdown(title, [row], COLUMNS), plan, noise)


def measure(
    rank: int, world: int, case: Case, vocabulary: int, plan: Plan, place: str
) -> tuple[list[Pair], int, list[float]]:
    """Timed pairs of this rank; bytes of a checkpoint; seconds from the start of each save to its end."""
    torch.set_num_threads(1)
    loop = Ours(case, vocabulary, _groups(Layout(cp_inner=world)))
    # The same group twice would let two threads send through it at once.
    together, threads = (Together.create(rank, world, HOURS_S) for _ in range(2))
    tensors = RunTensors(dict(loop.model.decoder.named_parameters()), loop.optimizer, rank)
    root, steps, seconds = Path(place), iter(range(1, 10**9)), list[float]()

    def describe(progress: Progress) -> Manifest:
        return Manifest(
            run_id="benchmark", progress=progress, world=world, model={}, config={}, corpus="", versions={}
        )

    writer = Writer(
        root, tensors.by_name, describe, threads=threads, together=together, keep=1, asynchronous=True
    )

    def with_save() -> None:
        writer.save(Progress(next(steps)))
        loop.step()

    def together_again() -> None:
        writer.wait()
        dist.barrier()

    loop.step()
    pairs = time_pairs(with_save, loop.step, plan, barrier=together_again)
    for _ in range(3):
        together_again()
        start = time.perf_counter()
        writer.save(Progress(next(steps)))
        writer.wait()
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    return pairs, sum(file.stat().st_size for file in root.rglob("*") if file.is_file()), seconds


@cache
def _groups(layout: Layout) -> Groups:
    return Groups.create(layout)


def figures(pairs: list[Pair]) -> dict[str, Any]:
    """The figures of a case: the side saves, the yardstick does not."""
    return {
        "step_with_save_s": median(pair.side.wall_s for pair in pairs),
        "step_s": median(pair.yardstick.wall_s for pair in pairs),
    } | ratios(pairs, lambda pair: pair.side.wall_s / pair.yardstick.wall_s)


COLUMNS: Columns = {
    "step with save, s": cell("step_with_save_s", ".3f"),
    "step, s": cell("step_s", ".3f"),
    **RATIO_COLUMNS,
    "a save alone, s": cell("save_s", ".3f"),
    "checkpoint, bytes": cell("checkpoint_bytes", ",d"),
}

if __name__ == "__main__":
    sys.exit(run_command(main))
