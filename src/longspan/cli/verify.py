"""`longspan verify`: prove that a run's layout computes the same function as one process."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from longspan.cli.output import Json, console, print_json, table
from longspan.cli.overrides import Override, parse_overrides
from longspan.spec.run import RunConfig

if TYPE_CHECKING:
    from longspan.train.groups import Groups
    from longspan.verify import Report

WORST_SHOWN = 8

Shrink = Annotated[int | None, Parameter(show_default=False)]


def verify(
    run: Path,
    /,
    *overrides: Override,
    layers: Shrink = None,
    sequence: Shrink = None,
    stage: int = 1,
    sabotage: str | None = None,
    json: Json = False,
) -> int:
    """Run the first steps as the layout does and as one process does by definition, and compare everything.

    Exit code 0 when all is equal within its bounds, 1 when something differs, also when a sabotage is caught.

    Args:
        run: The run file.
        overrides: As for every verb.
        layers: Keep only this many layers, for models that one process cannot hold.
        sequence: Shorten the rows to this many tokens.
        stage: Which of the run's stages, from 1; the others are left out.
        sabotage: Break the layout's run on purpose, to see that it is caught; `list` shows all.
        json: As for every verb.
    """
    if sabotage == "list":
        _show_sabotages(console())
        return 0
    config = RunConfig.load(run, parse_overrides(overrides)).one_stage(stage, sequence)
    report = verified(config, layers, sabotage)
    if report is None:
        return 0
    if json:
        print_json(report.as_json())
    else:
        show(report, console())
    return 0 if report.passed else 1


def verified(config: RunConfig, layers: int | None = None, sabotage: str | None = None) -> "Report | None":
    """The report, on rank 0."""
    from longspan.cli.ranks import on_ranks

    return on_ranks(_verify, config, layers, sabotage)


def _verify(config: RunConfig, groups: "Groups", layers: int | None, sabotage: str | None) -> Any:
    from longspan.train.session import Session
    from longspan.verify import verify

    return verify(Session.open(config, groups, layers=layers), sabotage)


def show(report: "Report", out: Console) -> None:
    """The report for people."""
    out.print(f"[bold]{report.run}[/]")
    if report.sabotage:
        out.print(f"sabotage: [bold]{report.sabotage}[/]")
    checks = table("check", "error", "bound", "", uncut=4)
    for check in report.checks:
        checks.add_row(
            check.name,
            _number(check.error),
            f"{check.bound:.1e}",
            "ok" if check.passed else "[red]DIFFERS[/]",
        )
    worst = table("worst gradients, float64", "error", "|grad| / |reference grad|", uncut=3)
    for row in report.parameters[:WORST_SHOWN]:
        worst.add_row(row.name, _number(row.error), f"{row.scale:.12f}")
    out.print(checks, worst, sep="\n")
    out.print(_verdict(report))


def _verdict(report: "Report") -> str:
    if report.passed and report.sabotage:
        return "[red]the sabotage was not caught[/]"
    if report.passed:
        return (
            f"[green]equal[/]: all {len(report.parameters)} gradients and every loss agree with one process"
        )
    return (
        "[red]caught[/]" if report.sabotage else "[red]the layout does not compute what one process does[/]"
    )


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else str(value)


def _show_sabotages(out: Console) -> None:
    from longspan.verify import SABOTAGES

    rows = table("sabotage", "fault")
    for sabotage in SABOTAGES.values():
        rows.add_row(sabotage.name, sabotage.fault)
    out.print(rows)
