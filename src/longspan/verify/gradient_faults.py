"""Faults in who sums which gradients, put into the executed path; see `sabotage`.

Over dp × cp FSDP sums gradients by a reduce-scatter along the weights' shard axis and an all-reduce along their
replicate axis. Nothing else uses these two groups to sum, so a fault replaces the collectives of just these groups.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from longspan.train import gradients, step
from longspan.train.session import Session

__all__ = [
    "average_gradients",
    "forget_cp",
    "forget_dp",
    "leave_division_on",
    "skip_dp_cp_sum",
    "skip_tp_sum",
]

Patch = AbstractContextManager[Any]
Place = dict[str, int]


def skip_dp_cp_sum(session: Session) -> Patch:
    """Each rank keeps its own gradient."""
    return _summing_only(session, lambda other, own: other == own)


def forget_dp(session: Session) -> Patch:
    """Gradients are summed over cp alone."""
    return _summing_only(session, lambda other, own: other["dp"] == own["dp"])


def forget_cp(session: Session) -> Patch:
    """Gradients are summed over dp alone."""
    return _summing_only(session, lambda other, own: other["cp"] == own["cp"])


def skip_tp_sum(_: Session) -> Patch:
    """Each tp rank keeps its own summand."""

    def take_own_part(parameters: Any) -> None:
        for parameter in parameters:
            if _is_partial(parameter.grad):
                own = parameter.grad.to_local()
                parameter.grad = DTensor.from_local(own, parameter.device_mesh, parameter.placements)

    def own_part(self: FSDPParam, grad: Tensor) -> Tensor:
        return grad.to_local() if isinstance(grad, DTensor) and _is_partial(grad) else real(self, grad)

    # TODO: FSDP sums over tp in a private method; find a public seam once it has one.
    real = FSDPParam._get_grad_inner_tensor
    return _both(
        patch.object(step, "sum_over_tp", take_own_part),
        patch.object(FSDPParam, "_get_grad_inner_tensor", own_part),
    )


def average_gradients(session: Session) -> Patch:
    """The sum over dp × cp is divided by its number of ranks."""
    ranks = session.groups.layout.size("dp_cp")

    def average(parameters: list[nn.Parameter]) -> None:
        gradients.sum_over_tp(parameters)
        for parameter in parameters:
            gradients.gradient(parameter).div_(ranks)

    return patch.object(step, "sum_over_tp", average)


def leave_division_on(_: Session) -> Patch:
    """FSDP divides by dp × cp, as it does when nobody tells it otherwise."""
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def _is_partial(grad: Any) -> bool:
    return isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements)


@contextmanager
def _both(first: Patch, second: Patch) -> Generator[None]:
    with first, second:
        yield


def _summing_only(session: Session, wanted: Callable[[Place, Place], bool]) -> Patch:
    """Sums over the weights' groups take in only ranks whose place is wanted beside this rank's own."""
    mesh = session.groups.weights
    assert mesh is not None, "blind refuses a layout without dp × cp"
    layout, names = session.groups.layout, mesh.mesh_dim_names or ()
    own = layout.coordinates(session.groups.rank)

    def kept(group: dist.ProcessGroup) -> list[int]:
        ranks = dist.get_process_group_ranks(group)
        return [place for place, rank in enumerate(ranks) if wanted(layout.coordinates(rank), own)]

    def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        everyone = tensor.new_empty(group.size(), *tensor.shape)
        real_gather(everyone.view(-1), tensor.contiguous().view(-1), group=group)
        return everyone[kept(group)].sum(0)

    def reduce_scatter(output: Tensor, input: Tensor, op: Any = None, group: Any = None, **rest: Any) -> Any:
        if group is not mesh.get_group("shard"):
            return real_scatter(output, input, group=group, **rest)
        return output.copy_(gathered(input, group).chunk(group.size())[dist.get_rank(group)])

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **rest: Any) -> Any:
        if "replicate" not in names or group is not mesh.get_group("replicate"):
            return real_reduce(tensor, op, group=group, **rest)
        return tensor.copy_(gathered(tensor, group))

    real_gather, real_scatter, real_reduce = (
        dist.all_gather_single,
        dist.reduce_scatter_single,
        dist.all_reduce,
    )
    return _both(
        patch.object(dist, "reduce_scatter_single", reduce_scatter),
        patch.object(dist, "all_reduce", all_reduce),
    )
