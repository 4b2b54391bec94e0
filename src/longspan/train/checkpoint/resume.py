"""Which checkpoint a run goes on from, and whether it may."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError
from longspan.spec.model import ModelSpec
from longspan.spec.run import RunConfig
from longspan.spec.run_sections import ModelSection
from longspan.train.checkpoint.folder import complete, steps_in
from longspan.train.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from longspan.train.checkpoint.output import CHECKPOINTS, run_id

__all__ = ["LATEST", "Found", "Start", "earlier_words", "find_start", "refuse_untrusted"]

LATEST = "latest"
# Keys whose change alters nothing but rounding, speed and what is written down.
MAY_DIFFER = (
    "layout",
    "attention",
    "memory",
    "output",
    "checkpoint",
    "batch.micro_batch",
    # Documents are compared by their content.
    "data.source",
    "train.eval_every",
    "train.eval_rows",
    "train.eval_sequence",
    "train.log_every",
    "train.loss_chunk",
    "train.threads",
    "train.timeout_s",
)


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from.

    Attributes:
        folder: the checkpoint.
        manifest: its manifest.
        own: the run in the output folder wrote it, and goes on there.
        allow_changes: differences from the run file were accepted.
    """

    folder: Path
    manifest: Manifest
    own: bool
    allow_changes: bool

    @property
    def step(self) -> int:
        """Optimizer steps that were taken."""
        return self.manifest.progress.step


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        config: the run, whose weights may come from elsewhere than its file says.
        found: the checkpoint, or None to start at step 0.
        notes: what a person should know of it, a line each.
    """

    config: RunConfig
    found: Found | None = None
    notes: tuple[str, ...] = ()


def find_start(
    config: RunConfig, wanted: str | bool, *, trust: bool = False, allow_changes: bool = False
) -> Start:
    """Where a run starts, from files that are quick to read; checksums of the rest come later.

    Args:
        config: the run as it is to go on.
        wanted: False to start anew; True or "latest" for the newest checkpoint of the output folder; otherwise
            the path of a checkpoint, or of a folder of safetensors, which are loaded as weights alone.
        trust: accept a checkpoint that this output folder's run did not write.
        allow_changes: accept a run file that differs from the checkpoint's in what it computes.

    Raises:
        CheckpointError: no such checkpoint, or one that may not be used.
    """
    if wanted is False:
        return Start(config)
    root = config.output.folder / CHECKPOINTS
    latest = wanted is True or wanted == LATEST
    folder = _latest(root) if latest else Path(wanted).resolve()
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; give a checkpoint, as in {root / 'step-00000060'}, or latest"
        )
    if not latest and not (folder / MANIFEST).is_file() and list(folder.glob("*.safetensors")):
        return _from_weights(config, folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {earlier_words(folder)}") from None
    own = folder.parent == root and manifest.run_id == run_id(config.output.folder)
    if not own:
        refuse_untrusted(folder, trust, f"the run in {config.output.folder}")
    changes = list(_changes(manifest, config))
    if changes and not allow_changes:
        raise CheckpointError(
            f"{folder} is of another run: {'; '.join(changes)}; go on as before, or --allow-changes"
        )
    taken, now = manifest.progress, config.stage_plan.tokens_before(manifest.progress.step)
    if now != taken.seen_tokens:
        raise CheckpointError(
            f"{folder} saw {taken.seen_tokens:,} tokens in {taken.step:,} steps, the run file means {now:,}, so that "
            "the schedule would jump and rows be skipped; change rows or batch by a stage after that step"
        )
    notes = tuple(f"changed since the checkpoint: {change}" for change in changes)
    progress = manifest.progress
    opening = f"going on from {folder}: {progress.step:,} steps, {progress.seen_tokens:,} tokens"
    return Start(config, Found(folder, manifest, own, allow_changes), (opening, *notes))


def refuse_untrusted(folder: Path, trust: bool, writer: str) -> None:
    """Raise CheckpointError for a checkpoint of unknown origin, unless it is trusted."""
    if not trust:
        raise CheckpointError(
            f"{folder} was not written by {writer}; add --trust-checkpoint if you know where it comes from"
        )


def earlier_words(folder: Path) -> str:
    """What can be done about a checkpoint that cannot be used: the newest complete one before it."""
    others = [path for path in complete(folder.parent).values() if path.name < folder.name]
    return (
        f"an earlier one is complete: --resume {others[-1]}"
        if others
        else "there is no earlier one beside it"
    )


def _latest(root: Path) -> Path:
    """The newest checkpoint, complete or not: passing over a damaged one in silence would hide the damage."""
    found = steps_in(root)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {root}; start without --resume")
    return list(found.values())[-1]


def _from_weights(config: RunConfig, folder: Path) -> Start:
    spec, stored = config.model_spec(), ModelSpec.from_hf(folder)
    if different := list(_differences(_plain(stored), _plain(spec), "model")):
        raise CheckpointError(
            f"{folder} holds another model: {'; '.join(different)}; make the run file agree"
        )
    model = ModelSection(weights=folder)
    note = f"{folder} holds safetensors alone: weights are taken from it, optimizer and schedule start anew"
    return Start(config.model_copy(update={"model": model}), None, (note,))


def _changes(manifest: Manifest, config: RunConfig) -> Iterator[str]:
    """What the run computes differently from the checkpoint's, as `key was A, is B`."""
    yield from _differences(manifest.model, _plain(config.model_spec()), "model")
    saved, now = _kept(manifest.config), _kept(json.loads(config.model_dump_json()))
    yield from _differences(saved, now, "")


def _plain(spec: ModelSpec) -> dict[str, Any]:
    return json.loads(spec.model_dump_json())


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """The run file without what may differ; the model is compared by its sizes, wherever its files lie."""
    kept = {}
    for section, values in config.items():
        if section == "model" or section in MAY_DIFFER:
            continue
        if section == "stages":
            values = [
                {key: value for key, value in stage.items() if key != "micro_batch"} for stage in values
            ]
        if isinstance(values, dict):
            values = {key: value for key, value in values.items() if f"{section}.{key}" not in MAY_DIFFER}
        kept[section] = values
    return kept


def _differences(saved: Any, now: Any, key: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*saved, *now]):
            yield from _differences(saved.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif saved != now:
        yield f"{key} was {saved!r}, is {now!r}"
