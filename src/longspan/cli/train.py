"""`longspan train`: run a run file."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from longspan.cli.output import Flag, Json, console, print_json
from longspan.cli.overrides import Override, parse_overrides
from longspan.spec.run import RunConfig

if TYPE_CHECKING:
    from longspan.train.checkpoint.resume import Start
    from longspan.train.groups import Groups
    from longspan.train.loop import TrainResult

Resume = Annotated[
    bool | str,
    Parameter(
        show_default=False,
        help="Go on from a checkpoint: its path, or latest (also when nothing follows) for the newest one of the "
        "output folder. A folder of safetensors is taken as weights alone.",
    ),
]


def train(
    run: Path,
    /,
    *overrides: Override,
    resume: Resume = False,
    trust_checkpoint: Flag = False,
    allow_changes: Flag = False,
    json: Json = False,
) -> None:
    """Train a model as a run file says, on the ranks of its layout.

    Under torchrun this process is one of the ranks; otherwise the ranks are started on this machine.

    Args:
        run: The run file.
        overrides: As for every verb.
        resume: As declared.
        trust_checkpoint: Go on from a checkpoint that the run in the output folder did not write.
        allow_changes: Go on although the run file computes something else than the checkpoint's did.
        json: As for every verb.
    """
    from longspan.train.checkpoint.resume import find_start
    from longspan.train.metrics import json_ready

    config = RunConfig.load(run, parse_overrides(overrides))
    start = find_start(config, resume, trust=trust_checkpoint, allow_changes=allow_changes)
    result = trained(start.config, json, start)
    if result is None:
        return
    if json:
        print_json(json_ready(asdict(result)))
    else:
        console().print(_words(result, config.output.folder))


def _words(result: "TrainResult", folder: Path) -> str:
    if result.first_loss is None or result.last_loss is None:
        return f"nothing was left to train; weights and records are in {folder}"
    if result.stopped:
        return f"stopped by {result.stopped} after step {result.last_step}; checkpoint in {result.checkpoint}"
    skipped = f"; {result.skipped_steps} steps made no update" if result.skipped_steps else ""
    return (
        f"loss {result.first_loss:.3f} → {result.last_loss:.3f} nats in {result.seconds:.0f} s, "
        f"{result.tokens_per_s:,.0f} tokens/s{skipped}; weights and records are in {folder}"
    )


def trained(config: RunConfig, quiet: bool, start: "Start | None" = None) -> "TrainResult | None":
    """Train; what it came to, on rank 0. Without a start, the run begins anew."""
    from longspan.cli.ranks import on_ranks

    return on_ranks(_train, config, quiet, start)


def _train(config: RunConfig, groups: "Groups", quiet: bool, start: "Start | None") -> Any:
    from longspan.cli.opening import loading, show_opening
    from longspan.train.loop import train
    from longspan.train.session import Session

    first, out = groups.rank == 0 and not quiet, console(as_json=True)
    with loading(out, first) as on_progress:
        session = Session.open(config, groups, on_progress=on_progress)
    if first:
        show_opening(session, out)
        for note in start.notes if start else ():
            out.print(note, markup=False, soft_wrap=True)
    result = train(session, quiet=quiet, found=start.found if start else None)
    return replace(result, notes=(*start.notes, *result.notes)) if start else result
