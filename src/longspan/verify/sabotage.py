"""Deliberate faults in the executed path, each of a kind that is silent elsewhere; `verify` must catch every one.

A sabotage replaces one function of the layout's run; comparison and reference are left alone. `blind` says why a batch
or layout cannot show the fault, so that "not caught" is never mistaken for "caught".
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Replicate

from longspan.attention import engine
from longspan.attention.transport import Held, Mover
from longspan.data import IGNORE, LocalBatch, PackedBatch
from longspan.errors import ConfigError
from longspan.spec import exchange
from longspan.spec.blocks import Block
from longspan.train import context_parallel, forward, gradients, groups, step
from longspan.train.forward import MicroBatch, ParallelModel
from longspan.train.session import Session, StepBatches
from longspan.train.sums import LossSums

__all__ = ["SABOTAGES", "Sabotage", "find_sabotage"]

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Sabotage:
    """One fault.

    Attributes:
        name: as on the command line.
        fault: what goes wrong, in words.
        apply: context in which the fault is in the executed path.
        blind: why this run cannot show it, or None.
    """

    name: str
    fault: str
    apply: Callable[[Session], Patch]
    blind: Callable[[Session], str | None]


def find_sabotage(name: str) -> Sabotage:
    """The sabotage of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in SABOTAGES:
        raise ConfigError(f"unknown sabotage {name!r}; use one of {', '.join(SABOTAGES)}")
    return SABOTAGES[name]


def _drop_bounds(_: Session) -> Patch:
    real: Any = context_parallel.plan_attention

    def one_document_a_row(batch: PackedBatch, windows: Any, context: Any) -> Any:
        borders = batch.sequence * torch.arange(batch.rows + 1).numpy()
        return real(SimpleNamespace(cu_seqlens=borders, rows=batch.rows), windows, context)

    return patch.object(forward, "plan_attention", one_document_a_row)


def _drop_window(_: Session) -> Patch:
    real = context_parallel.plan_attention

    def without_windows(batch: PackedBatch, windows: Any, context: Any) -> Any:
        plan = real(batch, (None,), context)
        everywhere = dict.fromkeys(windows, plan.exchanges[None])
        return replace(plan, exchanges=everywhere, masks=dict.fromkeys(windows, plan.masks[None]))

    return patch.object(forward, "plan_attention", without_windows)


def _with_local(change: Callable[[LocalBatch], LocalBatch]) -> Patch:
    real = forward.shard
    return patch.object(forward, "shard", lambda batch, index_t: change(real(batch, index_t)))


def _local_positions(local: LocalBatch) -> LocalBatch:
    return replace(local, positions_t=torch.arange(len(local.tokens_t)))


def _labels_shifted_after_sharding(local: LocalBatch) -> LocalBatch:
    """The next *local* token becomes the label: wrong wherever a rank's tokens do not follow each other."""
    shifted_t = torch.where(local.labels_t != IGNORE, local.tokens_t.roll(-1), IGNORE)
    return replace(local, labels_t=shifted_t)


def _skip_dp_cp_sum(_: Session) -> Patch:
    return patch.object(step, "sum_gradients", lambda parameters, *_: gradients.sum_over_tp(parameters))


def _skip_tp_sum(_: Session) -> Patch:
    real = gradients.sum_over_tp

    def take_own_part(parameters: Any) -> None:
        for parameter in parameters:
            grad = parameter.grad
            if isinstance(grad, DTensor) and parameter.placements == (Replicate(),):
                own = grad.to_local()
                parameter.grad = DTensor.from_local(own, parameter.device_mesh, parameter.placements)
            else:
                real([parameter])

    return patch.object(gradients, "sum_over_tp", take_own_part)


def _average_gradients(session: Session) -> Patch:
    real = gradients.sum_gradients
    layout = session.groups.layout

    def average(parameters: Any, *rest: Any) -> None:
        real(parameters := list(parameters), *rest)
        for parameter in parameters:
            parameter.grad.div_(layout.size("dp_cp"))

    return patch.object(step, "sum_gradients", average)


def _mean_of_means(session: Session) -> Patch:
    real = ParallelModel.token_losses
    parts = session.groups.layout.size("dp_cp") * session.config.batch_plan.num_microbatches

    def local_mean(self: ParallelModel, micro: MicroBatch, _: int) -> Any:
        own = int((micro.local.labels_t != IGNORE).sum())
        return real(self, micro, max(own, 1) * parts)

    return patch.object(ParallelModel, "token_losses", local_mean)


def _evaluation_averaged_per_rank(session: Session) -> Patch:
    ranks = session.groups.layout.size("dp_cp")

    def mean_of_means(sums: LossSums, own_groups: groups.Groups) -> LossSums:
        if torch.is_grad_enabled():
            return real(sums, own_groups)
        per_target = sums.table.sum(1)[0] / sums.table.sum(1)[1].clamp(min=1)
        table = torch.zeros_like(sums.table)
        table[:, 0] = torch.stack([per_target, torch.ones_like(per_target)]) / ranks
        return real(LossSums(table), own_groups)

    real = LossSums.over_ranks
    return patch.object(LossSums, "over_ranks", mean_of_means)


def _causal_block_too_far(_: Session) -> Patch:
    """Diagonal blocks see all of their keys: the causal border is one block late."""
    real = exchange.cut

    def late(*arguments: Any) -> Iterator[Block]:
        return (b._replace(shape="full") if b.shape == "causal" else b for b in real(*arguments))

    return patch.object(exchange, "cut", late)


class _StaleMover(Mover):
    """Gives this rank's own K/V in place of the rows that arrived: a buffer read before it was written."""

    def post(self, step_: Any, kv: dict[int, Held], grads: dict[int, Held]) -> Any:
        wait, own = super().post(step_, kv, grads), kv[self.exchange.rank]

        def stale() -> Any:
            arrived = wait()
            return {key: _overwritten(rows, own) if key[0] == "kv" else rows for key, rows in arrived.items()}

        return stale


def _overwritten(rows: Held, own: Held) -> Held:
    index = torch.arange(len(rows.k_mKD), device=rows.k_mKD.device) % len(own.k_mKD)
    return Held(rows.rows, own.k_mKD[index], own.v_mKD[index])


def _never(_: Session) -> None:
    return None


def _needs_cp(session: Session) -> str | None:
    return None if session.groups.layout.cp > 1 else "cp is 1: one rank holds every token"


def _needs_dp_cp(session: Session) -> str | None:
    return None if session.groups.layout.size("dp_cp") > 1 else "dp × cp is 1: there is nothing to sum over"


def _needs_packing(session: Session) -> str | None:
    packed = any(len(batch.sample_ids) > batch.rows for batch in _first_wholes(session))
    return (
        None
        if packed
        else "every row of the first step holds one document, so its bounds are those of the row"
    )


def _needs_window(session: Session) -> str | None:
    windows = [window for window in session.spec.windows if window is not None]
    longest = max(
        int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max()) for batch in _first_wholes(session)
    )
    if not windows:
        return "the model has no attention window"
    return (
        None if min(windows) < longest else f"no document is longer than the window of {min(windows)} tokens"
    )


def _needs_partial(session: Session) -> str | None:
    layout, spec = session.groups.layout, session.spec
    if layout.tp == 1:
        return "tp is 1: there is nothing to sum over"
    partial = layout.sp or spec.qk_norm or spec.num_kv_heads < layout.tp
    return None if partial else "without sp, QK-norm or shared K/V heads no gradient is summed over tp"


def _needs_moves(session: Session) -> str | None:
    moves = any(
        program.forward[0].sends
        for micro in session.training_step(0).micro_batches
        for mask in micro.attention.masks.values()
        for program in exchange.Exchange.build_all(mask, micro.attention.sharding)
    )
    return None if moves else "no K/V row of the first step has to move between ranks"


def _needs_uneven_targets(session: Session) -> str | None:
    batches, ranks = session.training_step(0), session.groups.layout.size("dp_cp")
    if ranks * len(batches.micro_batches) == 1:
        return "there is one rank with one micro-batch: its mean is the mean"
    return _evenly_dealt(session, batches)


def _needs_uneven_evaluation(session: Session) -> str | None:
    if session.groups.layout.size("dp_cp") == 1:
        return "there is one rank: its mean is the mean"
    return _evenly_dealt(session, session.evaluation_step())


def _evenly_dealt(session: Session, batches: StepBatches) -> str | None:
    """Every rank holds whole rows, so it can count the targets of all cp ranks; those of other dp ranks it cannot."""
    counts = {
        int((micro.whole.labels_T[micro.attention.sharding.index(rank)] != IGNORE).sum())
        for micro in batches.micro_batches
        for rank in range(session.groups.layout.cp)
    }
    even = len(counts) == 1 and session.groups.layout.dp == 1
    return "every part of it has equally many targets" if even else None


def _needs_split_documents(session: Session) -> str | None:
    """Wrong positions show only where they change a distance inside a document."""
    if session.groups.layout.cp == 1:
        return "cp is 1: positions differ by a constant in each document, which rotary embedding cannot see"
    return _needs_moves(session)


def _first_wholes(session: Session) -> list[PackedBatch]:
    return [micro.whole for micro in session.training_step(0).micro_batches]


def _positions(_: Session) -> Patch:
    return _with_local(_local_positions)


def _late_labels(_: Session) -> Patch:
    return _with_local(_labels_shifted_after_sharding)


def _stale(_: Session) -> Patch:
    return patch.object(engine, "Mover", _StaleMover)


_ALL = (
    Sabotage("drop-bounds", "documents of a row see each other", _drop_bounds, _needs_packing),
    Sabotage("drop-window", "windowed layers see every earlier token", _drop_window, _needs_window),
    Sabotage("wrong-positions", "positions count from 0 on each rank", _positions, _needs_split_documents),
    Sabotage("late-label-shift", "labels are shifted after sharding", _late_labels, _needs_cp),
    Sabotage("causal-offset", "the causal border is one block late", _causal_block_too_far, _never),
    Sabotage("stale-kv", "a rank attends to its own K/V instead of those received", _stale, _needs_moves),
    Sabotage("skip-cp-sum", "weight gradients are not summed over dp × cp", _skip_dp_cp_sum, _needs_dp_cp),
    Sabotage(
        "skip-tp-sum", "gradients of shared weights are not summed over tp", _skip_tp_sum, _needs_partial
    ),
    Sabotage("average-gradients", "gradients are averaged over dp × cp", _average_gradients, _needs_dp_cp),
    Sabotage("mean-of-means", "the loss is a mean of per-rank means", _mean_of_means, _needs_uneven_targets),
    Sabotage(
        "evaluation-per-rank",
        "evaluation averages per-rank means",
        _evaluation_averaged_per_rank,
        _needs_uneven_evaluation,
    ),
)

SABOTAGES = {sabotage.name: sabotage for sabotage in _ALL}
