"""Runs of the tiny model on the ranks of the pool, with the parts of a run in reach."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from longspan.model import whole
from longspan.spec.run import RunConfig
from longspan.train.checkpoint.folder import step_folder
from longspan.train.checkpoint.keeping import keeping
from longspan.train.checkpoint.manifest import read_manifest
from longspan.train.checkpoint.resume import Found
from longspan.train.checkpoint.together import Together
from longspan.train.forward import ParallelModel
from longspan.train.groups import Groups
from longspan.train.optimizer import build_optimizer
from longspan.train.session import Session
from longspan.train.step import gradients_of, learning_rate, update
from tests.train.parity import groups

QUIET = {"train.eval_every": 0, "train.dtype": "float64"}


@dataclass
class Run:
    """A run on this rank that a test steps by hand."""

    session: Session
    model: ParallelModel
    optimizer: torch.optim.Optimizer

    @classmethod
    def open(cls, file: str | Path, changes: dict[str, Any]) -> "Run":
        config = RunConfig.load(file, QUIET | changes)
        chosen = Groups.alone() if config.layout.world == 1 else groups(config.layout)
        session = Session.open(config, chosen)
        model = session.model()
        return cls(session, model, build_optimizer(model.parameters(), config.optimizer))

    def step(self, number: int) -> float:
        """Take a step, from 0; its loss."""
        sums = gradients_of(self.model, self.session.training_step(number))
        config = self.session.config
        update(self.model, self.optimizer, learning_rate(config, number), config.optimizer.clip_norm)
        return sums.mean

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state by name, whole."""
        tensors = {}
        for name, parameter in self.model.decoder.named_parameters():
            tensors[name] = whole(parameter).detach().clone()
            for kind, value in self.optimizer.state[parameter].items():
                tensors[f"{name}.{kind}"] = whole(value).clone()
        return tensors

    def keeping(self, found: Found | None = None):
        return keeping(self.session, found)


def found(folder: Path) -> Found:
    """A checkpoint of another output folder, taken as it is."""
    return Found(folder, read_manifest(folder), own=False, allow_changes=False)


def checkpoint(output: Path, step: int) -> Path:
    return step_folder(output / "checkpoints", step)


@cache
def together(world: int, number: int = 0) -> Together:
    """A group of all ranks of the pool, made once."""
    rank = torch.distributed.get_rank() if world > 1 else 0
    return Together.create(rank, world, 30.0)
