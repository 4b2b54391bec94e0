"""What one training step and one evaluation are worth knowing, as frozen values, and the run that they belong to."""

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar, Literal

import torch

from longspan.spec.run import RunConfig

__all__ = ["EvaluationRecord", "StepRecord", "describe_run", "json_ready", "run_tags"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Counts are over all ranks; times and memory are this rank's.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the step's targets, in nats.
        loss_by_position: the same by bucket of positions inside documents.
        loss_by_document_length: the same by bucket of tokens of the document, or of its piece that the row holds.
        grad_norm: global gradient norm before clipping.
        lr: learning rate of the step.
        tokens: tokens of the step.
        targets: tokens that were predicted and counted.
        rows: packed rows of the step.
        sequence: tokens of a row.
        stage: number of the step's stage, from 1.
        seen_tokens: tokens since the start of the run, this step included.
        step_s: seconds from the first micro-batch to the end of the update.
        wait_s: seconds of these in which the host waited for messages from other ranks.
        useful_flops: what the model needs: matrix products and exact attention pairs, without logits.
        executed_flops: the same with what is recomputed or replicated.
        logits_flops: the output projection, in neither of the two.
        peak_rss_bytes: largest resident memory of this process so far.
        peak_bytes: peak bytes of living tensor storages in this step, where they were counted.
        peak_source: who counted them: our census or the device's allocator.
        skipped: the weights were not updated, because the loss or the gradient was not finite.
        nonfinite: where that began, in words.
    """

    kind: ClassVar[str] = "step"

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    targets: int
    rows: int
    sequence: int
    stage: int
    seen_tokens: int
    step_s: float
    wait_s: float
    useful_flops: int
    executed_flops: int
    logits_flops: int
    peak_rss_bytes: int
    peak_bytes: int | None = None
    peak_source: Literal["census", "allocator"] | None = None
    skipped: bool = False
    nonfinite: str | None = None
    loss_by_position: Mapping[str, float] = field(default_factory=dict)
    loss_by_document_length: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, over all ranks."""
        return self.tokens / self.step_s

    @property
    def sequences_per_s(self) -> float:
        """Packed rows a second, over all ranks."""
        return self.rows / self.step_s

    @property
    def useful_flops_per_s(self) -> float:
        """Useful FLOPs a second, over all ranks."""
        return self.useful_flops / self.step_s

    @property
    def executed_flops_per_s(self) -> float:
        """Executed FLOPs a second, over all ranks."""
        return self.executed_flops / self.step_s

    @property
    def wait_share(self) -> float:
        """Share of the step that this rank's host spent waiting for messages, from 0 to 1."""
        return self.wait_s / self.step_s

    def values(self) -> dict[str, Any]:
        """Fields and rates by name."""
        rates = (
            "tokens_per_s",
            "sequences_per_s",
            "useful_flops_per_s",
            "executed_flops_per_s",
            "wait_share",
        )
        return asdict(self) | {rate: getattr(self, rate) for rate in rates}


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One pass over the held-out rows, the same ones each time. Counts and losses are over all ranks.

    Attributes:
        step: optimizer steps taken before it; 0 is the model that the run starts from.
        loss: mean loss of the rows' targets, in nats.
        loss_by_position: the same by bucket of positions inside documents.
        loss_by_document_length: the same by bucket of tokens of the document, or of its piece that the row holds.
        targets: tokens that were predicted and counted.
        seconds: time that it took on this rank.
    """

    kind: ClassVar[str] = "evaluation"

    step: int
    loss: float
    loss_by_position: Mapping[str, float]
    loss_by_document_length: Mapping[str, float]
    targets: int
    seconds: float

    def values(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


def run_tags(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """The short form of a run that stands in every line of a log: layout with cp and sp apart, dtype, device."""
    layout = config.layout
    sizes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "sp": layout.sp}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return sizes | {"dtype": config.train.dtype, "device": device.type, "device_name": name}


def describe_run(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Everything that tells this run from another: the whole configuration, versions, device and dtype."""
    packages = ("longspan", "numpy", "torch")
    versions = {"python": platform.python_version()} | {package: version(package) for package in packages}
    return run_tags(config, device) | {"versions": versions, "config": config.model_dump(mode="json")}


def json_ready(value: Any) -> Any:
    """The value with numbers that JSON lacks as words, so that the log of a broken run can still be read.

    >>> json_ready({"loss": float("nan"), "lr": 0.001})
    {'loss': 'nan', 'lr': 0.001}
    """
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
