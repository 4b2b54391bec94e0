"""Training in one process beside a plain loop over the same model in transformers, from the same weights.

`python -m benchmarks.training` takes optimizer steps with both in turns. The losses of the first steps are compared
before the clock runs; a case whose losses differ is an error.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from benchmarks.harness import (
    RATIO_COLUMNS,
    Columns,
    Pair,
    Plan,
    cell,
    device_or_auto,
    environment,
    markdown,
    ratios,
    run_command,
    save,
    say,
    time_call,
    time_pairs,
)
from benchmarks.loops import AdamWKind, Case, Loop, Ours, Transformers
from longspan.errors import LongspanError

STEPS_COMPARED = 3
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
ADAMW_KINDS: tuple[AdamWKind, ...] = ("fused", "foreach")

CASE, PLAN = Case(), Plan()


def main(
    *,
    case: Annotated[Case, Parameter(name="*")] = CASE,
    plan: Plan = PLAN,
    vocabulary: tuple[int, ...] = (512, 32_000),
    steps: int = 3,
    profile: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Time training steps in one process, ours and a plain loop over transformers.

    Args:
        case: what is trained.
        plan: how it is measured.
        vocabulary: Vocabulary sizes, a case each.
        steps: Optimizer steps in each timed piece.
        profile: Show where both sides' time goes instead.
    """
    case = replace(case, device=device_or_auto(case.device))
    torch.set_num_threads(case.threads)
    if profile:
        for size in vocabulary:
            _profile(case, size, steps)
        return
    noise = plan.noise()
    facts = {"environment": environment(case.device), "noise": noise}
    cases: list[dict[str, Any]] = [_compare(case, size, plan, steps) | facts for size in vocabulary]
    worst = min(cases, key=lambda row: float(row["ratio"]))
    result = {key: worst[key] for key in HEADLINE} | {"cases": cases}
    title = f"Training, one process, {case.layers} layers × {case.hidden}, {case.tokens:,} tokens"
    save(f"training_{case.device}", result, markdown(title, cases, COLUMNS), plan, noise)


def _compare(case: Case, vocabulary: int, plan: Plan, steps: int) -> dict[str, Any]:
    ours, theirs = Ours(case, vocabulary), _faster(case, vocabulary, steps)
    difference = _losses_differ_by(ours, Transformers(case, vocabulary, theirs.adamw))
    if difference > TOLERANCE[case.dtype]:
        raise LongspanError(f"vocabulary {vocabulary}: losses differ by {difference:.1e}; nothing was timed")
    say(f"vocabulary {vocabulary}: {plan.pairs} pairs, {theirs.adamw} AdamW on the other side")
    pairs = time_pairs(_many(ours, steps), _many(theirs, steps), plan, case.device)
    row = {"vocabulary": vocabulary} | figures(pairs, case.tokens * steps)
    config = {
        "cp": 1,
        "sp": False,
        **asdict(case),
        "steps_a_piece": steps,
        "transformers_adamw": theirs.adamw,
    }
    return row | {"loss_difference": difference, "config": config}


def _faster(case: Case, vocabulary: int, steps: int) -> Transformers:
    """The other side with the optimizer that is faster here."""
    seconds: dict[AdamWKind, float] = {}
    for kind in ADAMW_KINDS:
        loop = Transformers(case, vocabulary, kind)
        loop.step()
        seconds[kind] = median(time_call(loop.step, case.device).wall_s for _ in range(max(steps, 3)))
        say(f"transformers with {kind} AdamW: {seconds[kind]:.3f} s a step")
    return Transformers(case, vocabulary, min(seconds, key=lambda kind: seconds[kind]))


def _losses_differ_by(ours: Loop, theirs: Loop) -> float:
    """Largest relative difference of the first losses, so that later steps check the update too."""
    losses = [(ours.step(), theirs.step()) for _ in range(STEPS_COMPARED)]
    return max(abs(our - their) / their for our, their in losses)


def _many(loop: Loop, steps: int) -> Any:
    def run() -> None:
        for _ in range(steps):
            loop.step()

    return run


def figures(pairs: Sequence[Pair], tokens: int) -> dict[str, Any]:
    """The figures of a case: side is ours, the yardstick transformers.

    Args:
        pairs: timed pairs.
        tokens: tokens of one timed piece.
    """
    return {
        "ours_tokens_per_s": tokens / median(pair.side.wall_s for pair in pairs),
        "transformers_tokens_per_s": tokens / median(pair.yardstick.wall_s for pair in pairs),
    } | ratios(pairs, lambda pair: pair.yardstick.wall_s / pair.side.wall_s)


def _profile(case: Case, vocabulary: int, steps: int) -> None:
    order = "self_cpu_time_total" if case.device == "cpu" else "self_device_time_total"
    for loop in (Ours(case, vocabulary), Transformers(case, vocabulary, "fused")):
        loop.step()
        with torch.profiler.profile() as profiler:
            _many(loop, steps)()
        table = profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
        say(f"{type(loop).__name__}, vocabulary {vocabulary}, {steps} steps\n{table}")


HEADLINE = (
    "ours_tokens_per_s",
    "transformers_tokens_per_s",
    "ratio",
    "ratio_least",
    "ratio_greatest",
    "cpu_ratio",
)

COLUMNS: Columns = {
    "vocabulary": cell("vocabulary", ",d"),
    "longspan tokens/s": cell("ours_tokens_per_s", ",.0f"),
    "transformers tokens/s": cell("transformers_tokens_per_s", ",.0f"),
    **RATIO_COLUMNS,
    "loss difference": cell("loss_difference", ".0e"),
}

if __name__ == "__main__":
    sys.exit(run_command(main))
