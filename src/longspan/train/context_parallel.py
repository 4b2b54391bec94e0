"""Context parallelism: who owns which tokens of a micro-batch, and the exchange of every kind of attention mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention import AttentionCall, Kernel, Meter, Score, attend
from longspan.data import PackedBatch
from longspan.spec.exchange import Exchange, Options, Transport, build, inner_size
from longspan.spec.mask import Mask
from longspan.spec.sharding import Sharding, deal
from longspan.train.groups import Groups

__all__ = ["AttentionPlan", "Attend", "bind_attention", "plan_attention"]

Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""attend(q_tHD, k_tKD, v_tKD, window) -> out_tHD."""


@dataclass(frozen=True)
class AttentionPlan:
    """One micro-batch's token placement and, for each window of the model, this rank's exchange.

    Attributes:
        sharding: which cp rank owns which tokens; the same for all layers.
        masks: mask of the layers with each window (None: all earlier tokens of the document).
        exchanges: this rank's program for each.
    """

    sharding: Sharding
    masks: dict[int | None, Mask]
    exchanges: dict[int | None, Exchange]


@dataclass(frozen=True)
class ContextParallel:
    """How attention is shared: the run's choice, the same for every micro-batch.

    Attributes:
        cp: ranks that share a row.
        rank: this rank's place among them.
        sharding: how tokens are dealt, by its name.
        transport: how keys and values reach other ranks, by its name.
        options: settings of the transport.
    """

    cp: int
    rank: int
    sharding: str
    transport: Transport
    options: Options = Options()

    @property
    def inner(self) -> int:
        """Neighbouring ranks that trade heads."""
        return inner_size(self.transport, self.cp, self.options)


def plan_attention(
    batch: PackedBatch, windows: tuple[int | None, ...], context: ContextParallel
) -> AttentionPlan:
    """Deal the tokens of a micro-batch and write the programs; no communication, the same deal on every rank.

    Args:
        batch: the whole micro-batch.
        windows: the distinct windows of the model's layers.
        context: degree, place, sharding and transport.
    """
    bounds = tuple(batch.cu_seqlens.tolist())
    sharding = deal(context.sharding, bounds, batch.rows, context.cp, context.inner)
    masks = {window: Mask(bounds, window=window) for window in windows}
    exchanges = {
        window: build(mask, sharding, context.rank, context.transport, context.options)
        for window, mask in masks.items()
    }
    return AttentionPlan(sharding, masks, exchanges)


def bind_attention(
    plan: AttentionPlan, groups: Groups, kernel: Kernel, meter: Meter, grad_dtype: torch.dtype | None = None
) -> Attend:
    """The attention function that a model's layers call for one micro-batch.

    Args:
        plan: the micro-batch's.
        groups: this rank's.
        kernel: computes the blocks.
        meter: tally to add to.
        grad_dtype: in which partial gradients of keys and values travel; None for float32 or wider.
    """

    def call(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, window: int | None) -> Tensor:
        exchange = plan.exchanges[window]
        sequence, heads = groups.attention(exchange.reshard.size if exchange.reshard else 1)
        bound = AttentionCall(
            exchange=exchange,
            kernel=kernel,
            score=Score(q_tHD.shape[-1] ** -0.5),
            meter=meter,
            sequence=sequence,
            heads=heads,
            grad_dtype=grad_dtype,
        )
        return attend(q_tHD, k_tKD, v_tKD, bound)

    return call
