"""The gradient rule: local losses are divided by the *global* target count, so gradients are summed, never averaged.

Over dp × cp all gradients are summed, because those ranks hold the same weights and other tokens: FSDP does it during
backward (`data_parallel`). Over tp only those of weights that each rank applied to its own part, marked `Partial` by
DTensor.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["gradient", "sum_over_tp"]


def sum_over_tp(parameters: Iterable[nn.Parameter]) -> None:
    """Bring every DTensor gradient to the placement of its parameter; `Partial` ones are summed over tp.

    FSDP has done so already for the weights it looks after.
    """
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
