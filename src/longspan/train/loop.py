"""The training loop: steps prepared ahead, taken, measured, recorded; evaluation in between; weights at the end."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from longspan.model import full_tensors, save_hf
from longspan.spec.flops import StepFlops, step_flops
from longspan.train.census import Peak, measure_peak, peak_rss_bytes
from longspan.train.checkpoint.keeping import Keeper, keeping
from longspan.train.checkpoint.manifest import Progress
from longspan.train.checkpoint.resume import Found
from longspan.train.console import notes
from longspan.train.failure.guard import StepGuard
from longspan.train.failure.stopping import Stop
from longspan.train.forward import ParallelModel
from longspan.train.metrics import EvaluationRecord, StepRecord
from longspan.train.optimizer import build_optimizer
from longspan.train.recording import Record, recording
from longspan.train.session import Session, StepBatches
from longspan.train.step import evaluate, gradients_of, learning_rate, update

__all__ = ["TrainResult", "train"]

# Counting living storages slows a step on the CPU, so only these do it, and none of them is timed.
CENSUS_STEPS = 2


@dataclass(frozen=True)
class TrainResult:
    """What a run came to, over all ranks.

    Losses, speed and memory are None where no step was left to take.

    Attributes:
        first_loss: loss of the first step that was not skipped.
        last_loss: loss of the last one.
        eval_loss: last evaluation loss, or None.
        tokens_per_s: median over the steps without a storage census.
        peak_bytes: most living tensor bytes on any rank.
        seconds: from the first step to the end.
        checkpoint: path of the last complete checkpoint, or None.
        unigram_entropy: loss of the best model that ignores all context, in nats; None without targets.
        first_evaluation: the first one, before the first step unless the run was resumed; None if there was none.
        last_evaluation: the last one.
        last_step: number of the last step, from 1; None if none was taken.
        skipped_steps: steps without an update, because their loss or gradient was not finite.
        stopped: "SIGTERM" if that ended the run early, or None.
        notes: what a person should know of how it began, a line each, as of an earlier run that was set aside.
    """

    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    peak_bytes: int | None
    seconds: float
    checkpoint: str | None
    unigram_entropy: float | None = None
    first_evaluation: EvaluationRecord | None = None
    last_evaluation: EvaluationRecord | None = None
    last_step: int | None = None
    skipped_steps: int = 0
    stopped: str | None = None
    notes: tuple[str, ...] = ()


def train(session: Session, *, quiet: bool = False, found: Found | None = None) -> TrainResult:
    """Train as the session's run file says, and leave weights, records and checkpoints in its output folder.

    SIGTERM to any rank ends the run after a step, with everything saved as at its end.

    Args:
        session: every rank of the layout calls with its own.
        quiet: print nothing.
        found: the checkpoint to go on from, or None to start anew; what an earlier run left in the output
            folder is then set aside.

    Raises:
        LongspanError: a loss or gradient that is not finite; a checkpoint that cannot be loaded or saved.
    """
    start, stop = time.monotonic(), Stop()
    with stop.listening(), keeping(session, found) as keeper:
        say = notes(quiet or session.groups.rank != 0)
        for note in keeper.output.notes:
            say(note)
        loop = _Loop.begin(session, stop)
        progress = keeper.begin(loop.model.decoder.named_parameters(), loop.optimizer)
        if progress.step >= session.plan.steps:
            say(f"all {progress.step:,} steps were taken before; nothing is left to train")
        records = _steps(loop, keeper, progress, quiet, found)
        if records or not keeper.output.has_weights:
            _save(session, loop.model)
        result = _result(session, records, time.monotonic() - start, keeper.newest)
        stopped = "SIGTERM" if loop.guard.stopping else None
        return replace(result, stopped=stopped, notes=keeper.output.notes)


def _steps(
    loop: "_Loop", keeper: Keeper, progress: Progress, quiet: bool, found: Found | None
) -> list[Record]:
    """Take the steps that are left, with the evaluations that are due; the last step is saved."""
    session, records = loop.session, []
    if progress.step >= session.plan.steps:
        return records
    if session.groups.rank == 0:
        # Written last, it says that the weights are there; those of an earlier end are not this run's.
        (session.config.output.folder / "weights" / "config.json").unlink(missing_ok=True)
    with recording(
        session.config,
        torch.device(session.groups.device),
        rank=session.groups.rank,
        quiet=quiet,
        resumed_from_step=found.step if found else None,
    ) as write:

        def keep(record: Record) -> None:
            write(record)
            records.append(record)

        if progress.step == 0 and loop.evaluates_after(0):
            keep(loop.evaluation(0))
        for taken, batches in enumerate(_prepared_ahead(session, progress.step)):
            record = loop.step(batches, census=taken < CENSUS_STEPS)
            keep(record)
            # Before the step is saved, so that a run that goes on from it has not missed its evaluation.
            if loop.evaluates_after(record.step):
                keep(loop.evaluation(record.step))
            progress = Progress(record.step, record.seen_tokens)
            keeper.after_step(progress)
            if loop.guard.stopping:
                break
        keeper.finish(progress)
    return records


def _prepared_ahead(session: Session, first: int) -> Iterator[StepBatches]:
    """Every step's batches from `first` on; the next one is dealt and planned while the present one computes."""
    steps = session.plan.steps
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
    held_out: StepBatches | None
    guard: StepGuard

    @classmethod
    def begin(cls, session: Session, stop: Stop) -> "_Loop":
        model = session.model()
        session.groups.heartbeat.meter = model.meter
        optimizer = build_optimizer(model.parameters(), session.config.optimizer)
        held_out = session.evaluation_step() if session.config.train.eval_every else None
        return cls(session, model, optimizer, held_out, StepGuard(session, model, stop))

    def evaluates_after(self, step: int) -> bool:
        """Whether the run wants an evaluation after this many steps."""
        every = self.session.config.train.eval_every
        return bool(every) and (step % every == 0 or step == self.session.plan.steps)

    def evaluation(self, step: int) -> EvaluationRecord:
        """Evaluate the held-out rows after this many steps."""
        assert self.held_out is not None, "the run evaluates"
        start = time.perf_counter()
        sums = evaluate(self.model, self.held_out)
        return EvaluationRecord(
            step=step,
            loss=sums.mean,
            loss_by_position=sums.by_position,
            loss_by_document_length=sums.by_document_length,
            targets=sums.targets,
            seconds=time.perf_counter() - start,
        )

    def step(self, batches: StepBatches, *, census: bool) -> StepRecord:
        """Take one step; with a census, count living storages."""
        config, number = self.session.config, batches.step + 1
        self.session.groups.heartbeat.beat(number)
        lr, waited = learning_rate(config, batches.step), self.model.meter.wait_s
        start = time.perf_counter()
        with self._memory(census) as peak:
            sums = gradients_of(self.model, batches)
            allowed = partial(self.guard.allows, batches, sums.mean)
            norm = update(self.model, self.optimizer, lr, config.optimizer.clip_norm, allowed)
        seconds = time.perf_counter() - start
        flops, plan = _flops(self.session, batches), self.session.plan
        stage = plan.stage_of(batches.step)
        return StepRecord(
            step=number,
            loss=sums.mean,
            loss_by_position=sums.by_position,
            loss_by_document_length=sums.by_document_length,
            grad_norm=norm,
            lr=lr,
            tokens=stage.tokens_per_step,
            targets=sums.targets,
            rows=stage.batch.global_batch,
            sequence=stage.sequence,
            stage=stage.number,
            seen_tokens=plan.tokens_before(number),
            step_s=seconds,
            wait_s=self.model.meter.wait_s - waited,
            useful_flops=flops.useful,
            executed_flops=flops.executed,
            logits_flops=flops.logits,
            peak_rss_bytes=peak_rss_bytes(),
            peak_bytes=_most_of_any_rank(peak),
            peak_source=peak.source if peak else None,
            skipped=self.guard.nonfinite is not None,
            nonfinite=self.guard.nonfinite,
        )

    def _memory(self, census: bool):
        device = torch.device(self.session.groups.device)
        if device.type == "cpu" and not census:
            return nullcontext()
        return measure_peak(device, self.model.parameters())


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
        session.plan.stage_of(batches.step).tokens_per_step,
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


def _result(session: Session, records: list[Record], seconds: float, checkpoint: Path | None) -> TrainResult:
    newest = None if checkpoint is None else str(checkpoint)
    entropy = session.corpus.report.unigram_entropy
    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    if not steps:
        return TrainResult(None, None, None, None, None, seconds, newest, entropy)
    timed = steps[CENSUS_STEPS:] or steps
    made = [record for record in steps if not record.skipped] or steps
    return TrainResult(
        first_loss=made[0].loss,
        last_loss=made[-1].loss,
        eval_loss=evaluations[-1].loss if evaluations else None,
        tokens_per_s=median(record.tokens_per_s for record in timed),
        peak_bytes=max(record.peak_bytes or 0 for record in steps),
        seconds=seconds,
        checkpoint=newest,
        unigram_entropy=entropy,
        first_evaluation=evaluations[0] if evaluations else None,
        last_evaluation=evaluations[-1] if evaluations else None,
        last_step=steps[-1].step,
        skipped_steps=sum(record.skipped for record in steps),
    )
