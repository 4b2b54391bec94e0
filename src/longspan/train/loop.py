"""The training loop: steps prepared ahead, taken, measured, recorded; evaluation in between; weights at the end."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from longspan.errors import LongspanError
from longspan.model import full_tensors, save_hf
from longspan.spec.flops import StepFlops, step_flops
from longspan.train.census import Peak, measure_peak, peak_rss_bytes
from longspan.train.checkpoint.keeping import Keeper, keeping
from longspan.train.checkpoint.manifest import Progress
from longspan.train.checkpoint.resume import Found
from longspan.train.console import notes
from longspan.train.forward import ParallelModel
from longspan.train.metrics import StepRecord
from longspan.train.optimizer import build_optimizer
from longspan.train.recording import recording
from longspan.train.session import Session, StepBatches
from longspan.train.step import evaluate, gradients_of, learning_rate, update
from longspan.train.sums import LossSums

__all__ = ["TrainResult", "train"]

# Counting living storages slows a step on the CPU, so only these do it, and none of them is timed.
CENSUS_STEPS = 2


@dataclass(frozen=True)
class TrainResult:
    """What a run came to, over all ranks.

    Losses, speed and memory are None where no step was left to take.

    Attributes:
        first_loss: loss of the first step.
        last_loss: loss of the last step.
        eval_loss: last evaluation loss, or None.
        tokens_per_s: median over the steps without a storage census.
        peak_bytes: most living tensor bytes on any rank.
        seconds: from the first step to the end.
        checkpoint: path of the last complete checkpoint, or None.
    """

    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    peak_bytes: int | None
    seconds: float
    checkpoint: str | None


def train(session: Session, *, quiet: bool = False, found: Found | None = None) -> TrainResult:
    """Train as the session's run file says, and leave weights, records and checkpoints in its output folder.

    Args:
        session: every rank of the layout calls with its own.
        quiet: print nothing.
        found: the checkpoint to go on from, or None to start anew; what an earlier run left in the output
            folder is then set aside.

    Raises:
        LongspanError: a loss or gradient that is not finite; a checkpoint that cannot be loaded or saved.
    """
    start = time.monotonic()
    with keeping(session, found) as keeper:
        say = notes(quiet or session.groups.rank != 0)
        for note in keeper.output.notes:
            say(note)
        loop = _Loop.begin(session)
        progress = keeper.begin(loop.model.decoder.named_parameters(), loop.optimizer)
        if progress.step >= session.config.train.steps:
            say(f"all {progress.step:,} steps were taken before; nothing is left to train")
        records = _steps(loop, keeper, progress, quiet, found)
        if records or not keeper.output.has_weights:
            _save(session, loop.model)
        return _result(records, time.monotonic() - start, keeper.newest)


def _steps(
    loop: "_Loop", keeper: Keeper, progress: Progress, quiet: bool, found: Found | None
) -> list[StepRecord]:
    """Take the steps that are left; the last one is saved."""
    session, records = loop.session, []
    if progress.step >= session.config.train.steps:
        return records
    with recording(
        session.config,
        torch.device(session.groups.device),
        rank=session.groups.rank,
        quiet=quiet,
        resumed_from_step=found.step if found else None,
    ) as write:
        for batches in _prepared_ahead(session, progress.step):
            record = loop.step(batches, census=len(records) < CENSUS_STEPS)
            write(record)
            records.append(record)
            progress = Progress(record.step, record.seen_tokens)
            keeper.after_step(progress)
        keeper.finish(progress)
    return records


def _prepared_ahead(session: Session, first: int) -> Iterator[StepBatches]:
    """Every step's batches from `first` on; the next one is dealt and planned while the present one computes."""
    steps = session.config.train.steps
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as ahead:
        coming = ahead.submit(session.training_step, first)
        for step in range(first, steps):
            batches = coming.result()
            if step + 1 < steps:
                coming = ahead.submit(session.training_step, step + 1)
            yield batches


@dataclass(frozen=True, eq=False)
class _Loop:
    session: Session
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    evaluation: Callable[[], LossSums]

    @classmethod
    def begin(cls, session: Session) -> "_Loop":
        model = session.model()
        optimizer = build_optimizer(model.parameters(), session.config.optimizer)
        batches = session.evaluation_step() if session.config.train.eval_every else None

        def evaluation() -> LossSums:
            return evaluate(model, batches) if batches else LossSums.zero()

        return cls(session, model, optimizer, evaluation)

    def step(self, batches: StepBatches, *, census: bool) -> StepRecord:
        """Take one step, and evaluate after it where the run says so; with a census, count living storages."""
        config, number = self.session.config, batches.step + 1
        lr, waited = learning_rate(config, batches.step), self.model.meter.wait_s
        start = time.perf_counter()
        with self._memory(census) as peak:
            sums = gradients_of(self.model, batches)
            norm = update(self.model, self.optimizer, lr, config.optimizer.clip_norm)
        seconds = time.perf_counter() - start
        _refuse_nonfinite(number, sums.mean, norm)
        flops = _flops(self.session, batches)
        due = config.train.eval_every and (
            number % config.train.eval_every == 0 or number == config.train.steps
        )
        return StepRecord(
            step=number,
            loss=sums.mean,
            loss_by_position=sums.by_position,
            grad_norm=norm,
            lr=lr,
            tokens=config.tokens_per_step,
            targets=sums.targets,
            rows=config.batch.global_batch,
            seen_tokens=number * config.tokens_per_step,
            step_s=seconds,
            wait_s=self.model.meter.wait_s - waited,
            useful_flops=flops.useful,
            executed_flops=flops.executed,
            logits_flops=flops.logits,
            peak_rss_bytes=peak_rss_bytes(),
            peak_bytes=_most_of_any_rank(peak),
            peak_source=peak.source if peak else None,
            eval_loss=self.evaluation().mean if due else None,
        )

    def _memory(self, census: bool):
        device = torch.device(self.session.groups.device)
        if device.type == "cpu" and not census:
            return nullcontext()
        return measure_peak(device, self.model.parameters())


def _refuse_nonfinite(step: int, loss: float, norm: float) -> None:
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise LongspanError(
            f"step {step}: loss {loss} and gradient norm {norm} must be finite; lower optimizer.lr or lengthen "
            "schedule.warmup_tokens"
        )


def _flops(session: Session, batches: StepBatches) -> StepFlops:
    """FLOPs of the whole step over all ranks, from exact attention pairs."""
    windows = list(session.spec.window_layers)
    pairs = [
        sum(micro.attention.masks[window].pairs() for micro in batches.micro_batches) for window in windows
    ]
    # Every cp rank knows the pairs of whole rows, so the sum over dp × cp counts them cp times.
    layout = session.groups.layout
    total = session.groups.add_over_dp_cp(
        torch.tensor(pairs, dtype=torch.float64, device=session.groups.device)
    )
    return step_flops(
        session.spec,
        session.config.tokens_per_step,
        {window: int(count) // layout.cp for window, count in zip(windows, total.tolist(), strict=True)},
        tp=layout.tp,
        recompute=session.config.memory.recompute,
    )


def _most_of_any_rank(peak: Peak | None) -> int | None:
    if peak is None:
        return None
    most = torch.tensor(peak.num_bytes, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _save(session: Session, model: ParallelModel) -> None:
    """Write the weights as a Hugging Face folder; every rank takes part, rank 0 writes."""
    tensors = full_tensors(model.decoder)
    if session.groups.rank == 0:
        save_hf(session.config.output.folder / "weights", session.spec, tensors)
    else:
        for _ in tensors:
            pass


def _result(records: list[StepRecord], seconds: float, checkpoint: Path | None) -> TrainResult:
    newest = None if checkpoint is None else str(checkpoint)
    if not records:
        return TrainResult(None, None, None, None, None, seconds, newest)
    timed = records[CENSUS_STEPS:] or records
    evaluations = [record.eval_loss for record in records if record.eval_loss is not None]
    return TrainResult(
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        eval_loss=evaluations[-1] if evaluations else None,
        tokens_per_s=median(record.tokens_per_s for record in timed),
        peak_bytes=max(record.peak_bytes or 0 for record in records),
        seconds=seconds,
        checkpoint=newest,
    )
