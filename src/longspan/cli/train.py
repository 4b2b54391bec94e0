"""`longspan train`: run a run file."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.output import Json, console, print_json
from longspan.cli.overrides import Override, parse_overrides
from longspan.spec.run import RunConfig

if TYPE_CHECKING:
    from longspan.train.groups import Groups
    from longspan.train.loop import TrainResult


def train(run: Path, /, *overrides: Override, json: Json = False) -> None:
    """Train a model as a run file says, on the ranks of its layout.

    Under torchrun this process is one of the ranks; otherwise the ranks are started on this machine.

    Args:
        run: The run file.
        overrides: As for every verb.
        json: As for every verb.
    """
    config = RunConfig.load(run, parse_overrides(overrides))
    result = trained(config, json)
    if result is None:
        return
    if json:
        print_json(asdict(result))
    else:
        console().print(
            f"loss {result.first_loss:.3f} → {result.last_loss:.3f} nats in {result.seconds:.0f} s, "
            f"{result.tokens_per_s:,.0f} tokens/s; weights and records are in {config.output.folder}"
        )


def trained(config: RunConfig, quiet: bool) -> "TrainResult | None":
    """Train; what it came to, on rank 0."""
    from longspan.cli.ranks import on_ranks

    return on_ranks(_train, config, quiet)


def _train(config: RunConfig, groups: "Groups", quiet: bool) -> Any:
    from longspan.cli.opening import loading, show_opening
    from longspan.train.loop import train
    from longspan.train.session import Session

    first, out = groups.rank == 0 and not quiet, console(as_json=True)
    with loading(out, first) as on_progress:
        session = Session.open(config, groups, on_progress=on_progress)
    if first:
        show_opening(session, out)
    return train(session, quiet=quiet)
