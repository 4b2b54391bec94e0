"""Context parallelism: who owns which tokens of a micro-batch, and the exchange of every kind of attention mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from longspan.attention import AttentionCall, Kernel, Meter, attend
from longspan.data import PackedBatch
from longspan.spec.exchange import Exchange, Transport
from longspan.spec.mask import Mask
from longspan.spec.sharding import Sharding, deal

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
        sharding: "contiguous", "zigzag" or "document_zigzag".
        transport: "ring" or "all_gather".
    """

    cp: int
    rank: int
    sharding: str
    transport: Transport


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
    sharding = deal(context.sharding, bounds, batch.rows, context.cp)
    masks = {window: Mask(bounds, window=window) for window in windows}
    exchanges = {
        window: Exchange.build(mask, sharding, context.rank, context.transport)
        for window, mask in masks.items()
    }
    return AttentionPlan(sharding, masks, exchanges)


def bind_attention(
    plan: AttentionPlan, group: dist.ProcessGroup | None, kernel: Kernel, meter: Meter
) -> Attend:
    """The attention function that a model's layers call for one micro-batch."""

    def call(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, window: int | None) -> Tensor:
        scale = q_tHD.shape[-1] ** -0.5
        return attend(q_tHD, k_tKD, v_tKD, AttentionCall(plan.exchanges[window], group, kernel, scale, meter))

    return call
