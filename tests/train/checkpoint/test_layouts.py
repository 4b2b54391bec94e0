"""A checkpoint of one layout goes on in another as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.testing import run_ranks
from longspan.train.checkpoint.manifest import Progress
from longspan.train.checkpoint.reading import CheckedReader, read_tensors
from tests.train.checkpoint.runs import Run, checkpoint, found
from tests.verify.runs import write_run

LAYOUTS = {
    "tp2 cp2": {"layout.tp": 2, "layout.cp": 2},
    "tp2 sp cp2": {"layout.tp": 2, "layout.cp": 2, "layout.sp": True},
    "cp4": {"layout.cp": 4},
    "dp4": {"layout.dp": 4},
    "dp_shard4": {"layout.dp_shard": 4},
    "hsdp": {"layout.dp_replicate": 2, "layout.dp_shard": 2},
    "tp2 fsdp cp2": {"layout.tp": 2, "layout.cp": 2, "layout.fsdp": True},
    "tp2 dp_shard2": {"layout.tp": 2, "layout.dp_shard": 2, "layout.sp": True},
    "tp4": {"layout.tp": 4},
    "one": {},
}
# Rows for four dp ranks, and fewer key/value heads than tp ranks.
COMMON = {"batch.global_batch": 4, "train.steps": 8}
BEFORE, AFTER = 3, 3


def started(rank: int, world: int, file: str, changes: dict[str, Any]) -> Any:
    """A run of three steps that is saved, then three more; on rank 0 its state at the save and the losses after."""
    run = Run.open(file, changes)
    with run.keeping() as keeper:
        keeper.begin(run.model.decoder.named_parameters(), run.optimizer)
        for number in range(BEFORE):
            run.step(number)
        keeper.finish(Progress(BEFORE, run.session.plan.tokens_before(BEFORE)))
    state = run.state()
    losses = [run.step(BEFORE + number) for number in range(AFTER)]
    return (state, losses) if rank == 0 else None


def gone_on(rank: int, world: int, file: str, changes: dict[str, Any], folder: Path, optimizer: bool) -> Any:
    """State just after loading and the losses of three steps, on rank 0; without the optimizer's state if so asked."""
    run = Run.open(file, changes)
    if not optimizer:
        weights = {f"model.{name}": each for name, each in run.model.decoder.named_parameters()}
        start = found(folder)
        read_tensors(CheckedReader(folder, start.manifest), weights)
        losses = [run.step(BEFORE + number) for number in range(AFTER)]
        return None, losses
    with run.keeping(found(folder)) as keeper:
        progress = keeper.begin(run.model.decoder.named_parameters(), run.optimizer)
    assert progress == Progress(BEFORE, run.session.plan.tokens_before(BEFORE))
    state = run.state()
    losses = [run.step(progress.step + number) for number in range(AFTER)]
    return (state, losses) if rank == 0 else None


def world(layout: str) -> int:
    return 1 if layout == "one" else 4


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp2 cp2", "cp4"),
        ("tp2 cp2", "dp4"),
        pytest.param("cp4", "tp2 cp2", marks=pytest.mark.grid),
        ("dp4", "tp2 cp2"),
        ("tp2 sp cp2", "tp4"),
        pytest.param("tp4", "one", marks=pytest.mark.grid),
        ("one", "tp2 sp cp2"),
        ("tp2 fsdp cp2", "dp_shard4"),
        pytest.param("dp_shard4", "tp2 cp2", marks=pytest.mark.grid),
        ("hsdp", "tp2 dp_shard2"),
        pytest.param("tp2 dp_shard2", "one", marks=pytest.mark.grid),
    ],
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, saved: str, loaded: str) -> None:
    file = str(write_run(tmp_path))
    first = COMMON | LAYOUTS[saved] | {"output.folder": str(tmp_path / "first")}
    second = COMMON | LAYOUTS[loaded] | {"output.folder": str(tmp_path / "second")}
    state, losses = run_ranks(started, world(saved), file, first)[0]
    folder = checkpoint(tmp_path / "first", BEFORE)
    read_state, read_losses = run_ranks(gone_on, world(loaded), file, second, folder, True)[0]
    assert state.keys() == read_state.keys()
    assert any(name.endswith("exp_avg_sq") for name in state)
    for name, tensor in state.items():
        assert torch.equal(tensor, read_state[name]), name
    assert read_losses == pytest.approx(losses, rel=1e-10, abs=0)


def test_without_the_optimizers_state_the_losses_differ(tmp_path: Path) -> None:
    file = str(write_run(tmp_path))
    first = COMMON | LAYOUTS["tp2 cp2"] | {"output.folder": str(tmp_path / "first")}
    _, losses = run_ranks(started, 4, file, first)[0]
    _, forgetful = run_ranks(gone_on, 4, file, first, checkpoint(tmp_path / "first", BEFORE), False)[0]
    assert forgetful[0] == pytest.approx(losses[0], rel=1e-10)
    assert abs(forgetful[1] - losses[1]) > 1e-6
