"""Attention over several ranks beside the ideal: one process's fused attention, divided by the number of ranks.

`python -m benchmarks.attention --world 2 --sequence 8192` times ours and, beside it, every peer that runs here. Each
side takes turns with the ideal; a side's time is that of its slowest rank, from a common start. Before the clock runs,
output and gradients are compared with the ideal's, and a side whose results differ is not timed. One more row runs a
whole copy of the one-process attention on every rank at once and compares that with one copy alone: what it is above 1
is the machine's own doing.
"""

import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from benchmarks.harness import (
    Columns,
    Pair,
    Plan,
    Spread,
    cell,
    device_or_auto,
    environment,
    markdown,
    over_ranks,
    run_command,
    save,
    say,
)
from benchmarks.peers import PEERS
from benchmarks.ranks import measure, profile
from benchmarks.sides import COPIES, OURS, WHOLE, Case, Side
from longspan.errors import RankError
from longspan.testing import run_ranks

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float64": 1e-10}
PASSES = {True: "forward + backward", False: "forward"}
HOURS_S = 7200.0


@dataclass(frozen=True)
class Ability:
    """What a side can do on this machine.

    Attributes:
        backward: whether it has a backward pass; None if nothing can be timed.
        reason: why not all of it, in one line.
    """

    backward: bool | None
    reason: str = ""


CASE, PLAN = Case(), Plan()


def main(
    *,
    case: Annotated[Case, Parameter(name="*")] = CASE,
    plan: Plan = PLAN,
    transport: Literal["ring", "all_gather", "needed", "all_to_all", "each"] = "each",
    peers: bool = True,
    profile: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Time attention, forward and backward, beside the ideal.

    Args:
        case: what is computed.
        plan: how it is measured.
        transport: Which of ours.
        peers: Time other libraries too.
        profile: Show where our time goes instead.
    """
    case = replace(case, device=device_or_auto(case.device))
    ours = [side for name, side in OURS.items() if transport in (name, "each")]
    if profile:
        return _profile(case, ours, plan.pairs)
    noise = plan.noise()
    facts = {"config": case.config(), "environment": environment(case.device), "noise": noise}
    controls = [COPIES] if case.world > 1 else []
    rows = [_row(case, side, Ability(True), plan) | facts for side in (*ours, *controls)]
    if peers and case.world > 1:
        rows += [_row(case, side, _ability(case, side), plan) | facts for side in PEERS]
    title = f"Attention, {case.world} {'ranks' if case.world > 1 else 'process'}, {case.sequence:,} tokens"
    stem = f"attention_{case.device}_{case.world}_{case.sequence}"
    save(stem, rows, markdown(title, rows, COLUMNS), plan, noise)


def _profile(case: Case, sides: list[Side], repeats: int) -> None:
    for side in sides:
        tables = run_ranks(profile, case.world, case, side, True, repeats, timeout_s=HOURS_S)
        say(f"{side.name}, rank 0, {repeats} passes forward + backward\n{tables[0]}")


def _ability(case: Case, side: Side) -> Ability:
    """Try a side on a short sequence, with and then without its backward pass."""
    small = replace(case, sequence=128 * case.world)
    reason = ""
    for backward in (True, False):
        say(f"{side.name}: trying {PASSES[backward]}")
        try:
            error = _measure(small, side, backward, Plan(pairs=0, warmup=0))[0]
        except RankError as failure:
            reason = reason or first_sentence(failure)
            continue
        if error > TOLERANCE[case.dtype]:
            wrong = f"its result is wrong: off by {error:.0%} of the largest value"
            return Ability(None, wrong)
        return Ability(backward, f"no backward here: {reason}" if reason else "")
    return Ability(None, reason)


def first_sentence(failure: RankError) -> str:
    """What went wrong on the first rank that failed, without the advice that follows."""
    return str(failure).split(" failed: ", 1)[-1].split(". ", 1)[0]


def _row(case: Case, side: Side, ability: Ability, plan: Plan) -> dict[str, Any]:
    if ability.backward is None:
        return unmeasured(side, ability.reason)
    say(f"{side.name}: {PASSES[ability.backward]}, {plan.pairs} pairs")
    try:
        error, pairs = _measure(case, side, ability.backward, plan)
    except RankError as failure:
        if side in OURS.values():
            raise
        return unmeasured(side, first_sentence(failure))
    note = "; ".join(filter(None, (side.note, ability.reason)))
    return (
        {"name": side.name, "passes": PASSES[ability.backward]}
        | figures(pairs, case.world, copies=case.world if side.sharding == WHOLE else 1)
        | {
            "error": error,
            "note": note,
        }
    )


def _measure(case: Case, side: Side, backward: bool, plan: Plan) -> tuple[float, list[Pair]]:
    measured = run_ranks(measure, case.world, case, side, backward, plan, timeout_s=HOURS_S)
    return max(rank.error for rank in measured), over_ranks([rank.pairs for rank in measured])


def figures(pairs: list[Pair], world: int, copies: int = 1) -> dict[str, Any]:
    """The figures of a row, from the pairs of a whole world that computed so many copies of the yardstick's work."""
    ideal = world / copies
    ratio = Spread.of([pair.side.wall_s * ideal / pair.yardstick.wall_s for pair in pairs])
    return {
        "seconds": median(pair.side.wall_s for pair in pairs),
        "ideal_seconds": median(pair.yardstick.wall_s for pair in pairs) / ideal,
        "ratio_to_ideal": ratio.median,
        "ratio_least": ratio.least,
        "ratio_greatest": ratio.greatest,
        "cpu_ratio": median(pair.side.cpu_s / copies / pair.yardstick.cpu_s for pair in pairs),
        "pairs": len(pairs),
    }


def unmeasured(side: Side, reason: str) -> dict[str, Any]:
    """The row of a side that cannot be timed."""
    empty = dict.fromkeys(("seconds", "ideal_seconds", "ratio_to_ideal", "ratio_least", "ratio_greatest"))
    return (
        {"name": side.name, "passes": None}
        | empty
        | {
            "cpu_ratio": None,
            "pairs": 0,
            "error": None,
            "note": f"not run: {reason}",
        }
    )


COLUMNS: Columns = {
    "attention": cell("name", ""),
    "passes": cell("passes", ""),
    "seconds": cell("seconds", ".3f"),
    "ideal": cell("ideal_seconds", ".3f"),
    "÷ ideal": cell("ratio_to_ideal", ".3f"),
    "least": cell("ratio_least", ".3f"),
    "greatest": cell("ratio_greatest", ".3f"),
    "CPU ÷ ideal": cell("cpu_ratio", ".3f"),
    "pairs": cell("pairs", "d"),
    "error": cell("error", ".0e"),
    "note": cell("note", ""),
}

if __name__ == "__main__":
    sys.exit(run_command(main))
