"""`longspan demo`: the main job from start to end on any machine."""

import time
from dataclasses import asdict
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from rich.console import Console

from longspan.cli.output import Json, console, print_json
from longspan.cli.overrides import Override, parse_overrides
from longspan.cli.train import trained
from longspan.cli.verify import show, verified
from longspan.spec.run import RunConfig

if TYPE_CHECKING:
    from longspan.train.loop import TrainResult

# The proof runs the demo's own model and layout in float64, where full rows would take minutes.
VERIFIED_TOKENS = 1024


def demo(*overrides: Override, json: Json = False) -> int:
    """Train a small Llama on packed source code over four processes, then prove that they compute what one does.

    Exit code 0 when the layout equals one process, 1 when it does not.

    Args:
        overrides: As for every verb.
        json: As for every verb.
    """
    start, out, changes = time.monotonic(), console(as_json=True), parse_overrides(overrides)
    with as_file(files("longspan.cli") / "demo.toml") as run:
        config = RunConfig.load(run, changes)
    rows = min(VERIFIED_TOKENS, config.stage_plan.stages[0].sequence)
    shorter = config.one_stage(1, rows)
    if not json:
        out.print("[bold]1. Train[/]: tensor, sequence and context parallelism over packed documents")
    result = trained(config, quiet=json)
    if not json:
        out.print(f"\n[bold]2. Verify[/]: the same model and layout on rows of {rows:,} tokens")
    report = verified(shorter)
    if result is None or report is None:
        return 0
    seconds = time.monotonic() - start
    if json:
        print_json(asdict(result) | {"verified": report.passed, "seconds": seconds})
    else:
        show(report, out)
        _show_end(config, result, seconds, out)
    return 0 if report.passed else 1


def _show_end(config: RunConfig, result: "TrainResult", seconds: float, out: Console) -> None:
    folder = config.output.folder
    out.print(
        f"\nloss fell from {result.first_loss:.3f} to {result.last_loss:.3f} nats a byte; all of it took "
        f"{seconds:.0f} s"
    )
    if result.unigram_entropy is not None:
        out.print(
            f"a model that only knew how often each byte occurs would have {result.unigram_entropy:.3f}"
        )
    out.print(f"records      {folder / 'steps.jsonl'}", soft_wrap=True)
    if config.output.tensorboard:
        out.print(f"curves       tensorboard --logdir {folder / 'tensorboard'}", soft_wrap=True)
    out.print(f"weights      {folder / 'weights'} (a Hugging Face folder)", soft_wrap=True)
    out.print("next         longspan verify examples/demo.toml --sabotage drop-bounds")
