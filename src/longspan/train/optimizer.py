"""AdamW over plain and split weights, and clipping by the norm of the whole gradient."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from longspan.errors import ConfigError
from longspan.spec.run_sections import OptimizerSection

__all__ = ["build_optimizer", "clip_gradients", "global_norm", "set_learning_rate"]


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSection) -> AdamW:
    """AdamW (arXiv:1711.05101) whose two moments are as wide as the weights and split like them.

    Matrices, embeddings among them, decay; norm weights and biases do not. The moments cost 8 bytes for each
    float32 weight that this rank holds.

    Args:
        parameters: plain or DTensor parameters.
        settings: learning rate, betas, eps and weight decay.

    Raises:
        ConfigError: weights narrower than float32, in which small updates would be lost.
    """
    # One fused call takes either plain tensors or DTensors, so these never share a group.
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        if torch.finfo(parameter.dtype).bits < 32:
            raise ConfigError(
                f"AdamW needs float32 weights, got {parameter.dtype}; compute in that, keep float32"
            )
        decays = parameter.ndim >= 2
        groups.setdefault((decays, isinstance(parameter, DTensor)), []).append(parameter)
    return AdamW(
        [
            {"params": members, "weight_decay": settings.weight_decay if decays else 0.0}
            for (decays, _), members in groups.items()
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter]) -> float:
    """L2 norm of the gradient of the whole model, each weight counted once, accumulated in float64.

    A gradient that is split over mesh axes is summed over exactly those; a replicated or plain one is taken
    from this rank. Costs one all-reduce of one number for each set of axes that some weight is split over,
    and one wait for the device. Every rank of the meshes calls it with the same parameters in the same order.

    Args:
        parameters: plain or DTensor parameters; those without a gradient count nothing.

    Returns:
        The norm; inf or nan if the gradient is not finite.

    Raises:
        ValueError: a gradient is a partial sum, which has no norm yet.
    """
    squares: dict[tuple[DeviceMesh, tuple[int, ...]] | None, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            split = _split_axes(parameter.grad)
            square = torch.linalg.vector_norm(_local(parameter.grad), dtype=torch.float64).square()
            squares[split] = squares[split] + square if split in squares else square
    for split, square in squares.items():
        if split is not None:
            mesh, axes = split
            for axis in axes:
                torch.distributed.all_reduce(square, group=mesh.get_group(axis))
    return math.sqrt(sum(square.item() for square in squares.values()))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Norm of the gradients before they are scaled, in place, to a global norm of at most `max_norm`.

    Gradients that are not finite stay as they are: the caller sees it in the returned norm and decides.

    Args:
        parameters: as for `global_norm`.
        max_norm: bound on the norm; 0 does not clip.
    """
    parameters = list(parameters)
    norm = global_norm(parameters)
    if 0 < max_norm < norm < math.inf:
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def _split_axes(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh axes over which the gradient is split, or None if this rank holds all of it."""
    if not isinstance(gradient, DTensor):
        return None
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(
            f"gradient is still a partial sum ({gradient.placements}); sum it over its mesh first"
        )
    mesh = gradient.device_mesh
    axes = tuple(
        axis
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
    return (mesh, axes) if axes else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
