"""Deliberate faults in the executed path, each of a kind that is silent elsewhere; `verify` must catch every one.

A sabotage replaces one function of the layout's run; comparison and reference are left alone. Whether a run can show
the fault at all is said by `blind`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from longspan.attention import engine, steps
from longspan.attention.heads import HeadMover
from longspan.attention.held import Held, Key
from longspan.attention.steps import Inputs
from longspan.attention.transport import Mover
from longspan.data import IGNORE, LocalBatch, PackedBatch
from longspan.errors import ConfigError
from longspan.spec.blocks import Block
from longspan.spec.exchange import needs
from longspan.train import context_parallel, forward, groups
from longspan.train.forward import MicroBatch, ParallelModel
from longspan.train.session import Session
from longspan.train.sums import LossSums
from longspan.verify import blind
from longspan.verify import gradient_faults as faults

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


def _mean_of_means(session: Session) -> Patch:
    real = ParallelModel.token_losses
    parts = session.groups.layout.size("dp_cp") * session.plan.stages[0].batch.num_microbatches

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
    real = needs.cut

    def late(*arguments: Any) -> Iterator[Block]:
        return (b._replace(shape="full") if b.shape == "causal" else b for b in real(*arguments))

    return patch.object(needs, "cut", late)


class _StaleMover(Mover):
    """Gives this rank's own K/V in place of the rows that arrived: a buffer read before it was written."""

    def post(self, step: Any, kv: dict[Key, Held], grads: dict[Key, Held]) -> Any:
        wait, own = super().post(step, kv, grads), kv[self.exchange.rank, None]

        def stale() -> Any:
            arrived = wait()
            return {key: _overwritten(rows, own) if key[0] == "kv" else rows for key, rows in arrived.items()}

        return stale


class _StaleHeadMover(HeadMover):
    """The same where heads are traded: every member's keys and values are this rank's own."""

    def inputs_to_heads(self, chunk: int, inputs: Inputs) -> Any:
        wait, rows, rank = super().inputs_to_heads(chunk, inputs), self.reshard.num_rows, self.reshard.rank

        def stale() -> Inputs:
            arrived = wait()
            start = sum(rows[:rank])
            index = torch.arange(len(arrived.k_tKD), device=arrived.k_tKD.device) % rows[rank] + start
            return arrived._replace(k_tKD=arrived.k_tKD[index], v_tKD=arrived.v_tKD[index])

        return stale


def _overwritten(rows: Held, own: Held) -> Held:
    index = torch.arange(len(rows.k_mKD), device=rows.k_mKD.device) % len(own.k_mKD)
    return Held(rows.rows, own.k_mKD[index], own.v_mKD[index])


def _positions(_: Session) -> Patch:
    return _with_local(_local_positions)


def _late_labels(_: Session) -> Patch:
    return _with_local(_labels_shifted_after_sharding)


def _stale(session: Session) -> Patch:
    if session.context(session.plan.stages[0]).inner > 1:
        return patch.object(engine, "HeadMover", _StaleHeadMover)
    return patch.object(steps, "Mover", _StaleMover)


_ALL = (
    Sabotage("drop-bounds", "documents of a row see each other", _drop_bounds, blind.needs_packing),
    Sabotage("drop-window", "windowed layers see every earlier token", _drop_window, blind.needs_window),
    Sabotage(
        "wrong-positions", "positions count from 0 on each rank", _positions, blind.needs_split_documents
    ),
    Sabotage("late-label-shift", "labels are shifted after sharding", _late_labels, blind.needs_late_labels),
    Sabotage(
        "causal-offset",
        "the causal border is one block late",
        _causal_block_too_far,
        blind.needs_causal_blocks,
    ),
    Sabotage(
        "stale-kv", "a rank attends to its own K/V instead of those received", _stale, blind.needs_moves
    ),
    Sabotage(
        "skip-cp-sum",
        "weight gradients are not summed over dp × cp",
        faults.skip_dp_cp_sum,
        blind.needs_dp_cp,
    ),
    Sabotage(
        "forget-dp",
        "weight gradients are summed over cp alone, not dp × cp",
        faults.forget_dp,
        blind.needs_dp,
    ),
    Sabotage(
        "forget-cp",
        "weight gradients are summed over dp alone, not dp × cp",
        faults.forget_cp,
        blind.needs_cp,
    ),
    Sabotage(
        "skip-tp-sum",
        "gradients of shared weights are not summed over tp",
        faults.skip_tp_sum,
        blind.needs_partial,
    ),
    Sabotage(
        "average-gradients",
        "gradients are averaged over dp × cp",
        faults.average_gradients,
        blind.needs_dp_cp,
    ),
    Sabotage(
        "fsdp-division",
        "FSDP's own division by dp × cp is left on",
        faults.leave_division_on,
        blind.needs_dp_cp,
    ),
    Sabotage(
        "mean-of-means", "the loss is a mean of per-rank means", _mean_of_means, blind.needs_uneven_targets
    ),
    Sabotage(
        "evaluation-per-rank",
        "evaluation averages per-rank means",
        _evaluation_averaged_per_rank,
        blind.needs_uneven_evaluation,
    ),
)

SABOTAGES = {sabotage.name: sabotage for sabotage in _ALL}
