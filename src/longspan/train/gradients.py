"""The gradient rule: local losses are divided by the *global* target count, so gradients are summed, never averaged.

Over tp, gradients of weights that each rank applied to its own part (marked `Partial` by DTensor) are summed;
over dp × cp, all are, because those ranks hold the same weights and other tokens.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.attention import Meter
from longspan.train.groups import Groups

__all__ = ["gradient", "sum_gradients"]

BUCKET_BYTES = 32 * 2**20


def sum_gradients(parameters: Iterable[nn.Parameter], groups: Groups, meter: Meter) -> None:
    """Make every gradient the gradient of the global loss, in place.

    Args:
        parameters: plain or DTensor parameters with a gradient; the same order on every rank.
        groups: the tp mesh is the parameters' own; dp × cp is summed over in buckets.
        meter: tally to which the waiting is added.
    """
    sum_over_tp(parameters := list(parameters))
    gradients = [_local(gradient(parameter)) for parameter in parameters]
    for bucket in _buckets(gradients):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        with meter.waiting():
            groups.add_over_dp_cp(flat)
        for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(summed.view_as(grad))


def sum_over_tp(parameters: Iterable[nn.Parameter]) -> None:
    """Bring every DTensor gradient to the placement of its parameter; `Partial` ones are summed over tp."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
            parameter.grad = grad.redistribute(placements=parameter.placements)


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter that every step uses.

    Raises:
        ValueError: it has none, so a sum over ranks would go wrong without a word.
    """
    if parameter.grad is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no gradient; every one must take part"
        )
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to `BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
