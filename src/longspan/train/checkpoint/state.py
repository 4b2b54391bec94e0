"""What a run needs to go on, as tensors by name: weights, optimizer state, random number generators.

Names are `model.NAME`, `optimizer.NAME.KIND` and `rng.RANK.DEVICE`, where NAME is the parameter's. Tensors are the
run's own, plain or DTensors of any mesh: `torch.distributed.checkpoint` writes and reads each rank's part.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["RunTensors"]


class RunTensors:
    """The tensors of a run on this rank.

    Args:
        parameters: the model's, by name. They are kept from here on: a model that gathers its weights for a
            forward pass may name others later.
        optimizer: AdamW over these parameters.
        rank: this process's global rank.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, rank: int
    ) -> None:
        self.parameters = dict(parameters)
        self._optimizer = optimizer
        self._rank = rank

    def by_name(self, *, rng: bool = True) -> dict[str, Tensor]:
        """All of them; weights and optimizer state are the live tensors, generators are copies.

        Args:
            rng: with this rank's random number generators.
        """
        tensors: dict[str, Tensor] = {f"model.{name}": each for name, each in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for kind, value in self._moments(parameter).items():
                tensors[f"optimizer.{name}.{kind}"] = value
        return tensors | (self._generators() if rng else {})

    def set_generators(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the random number generators back to states that `by_name` gave; those that are missing stay."""
        if (cpu := tensors.get(f"rng.{self._rank}.cpu")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := tensors.get(f"rng.{self._rank}.cuda")) is not None:
            torch.cuda.set_rng_state(cuda)

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of one parameter, made as its first step would make it where it is not there yet."""
        state = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _generators(self) -> dict[str, Tensor]:
        states = {f"rng.{self._rank}.cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states[f"rng.{self._rank}.cuda"] = torch.cuda.get_rng_state()
        return states
