"""What torch's fused operators have in common: full and causal blocks, one head size, no capped scores."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from longspan.attention.score import Score
from longspan.spec.blocks import Block


class Fused(ABC):
    """A kernel around a fused operator, which gets anticausal squares with their rows in reverse order.

    Attributes:
        name: of the kernel.
        device: type of the devices that it runs on.
    """

    name: str
    device: str

    def refusal(self, q_tHD: Tensor, v_tKD: Tensor, score: Score) -> str | None:
        """Refuse other devices, and capped scores; a subclass adds its own reasons."""
        if q_tHD.device.type != self.device:
            return f"{self.name} runs on {self.device} tensors, got {q_tHD.device.type}"
        if score.softcap is not None:
            return f"{self.name} cannot cap scores (softcap={score.softcap}); use kernel='reference'"
        return None

    def forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if block.shape != "anticausal":
            return self._forward(q_nHD, k_mKD, v_mKD, block, score)
        out_nHD, lse_nH = self._forward(q_nHD.flip(0), k_mKD.flip(0), v_mKD.flip(0), _flipped(block), score)
        return out_nHD.flip(0), lse_nH.flip(0)

    def backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        if block.shape != "anticausal":
            return self._backward(saved, grad_nHD, block, score)
        reversed_rows = tuple(t.flip(0) for t in saved)
        dq, dk, dv = self._backward(reversed_rows, grad_nHD.flip(0), _flipped(block), score)
        return dq.flip(0), dk.flip(0), dv.flip(0)

    @abstractmethod
    def _forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor]:
        """`Kernel.forward` of a block that is not anticausal."""

    @abstractmethod
    def _backward(
        self, saved: tuple[Tensor, ...], grad_nHD: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernel.backward` of a block that is not anticausal."""


def widen(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The same heads with zeros up to the largest head size of all [.., D]: they change no product."""
    size = max(tensor.shape[-1] for tensor in tensors)
    return [torch.nn.functional.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in tensors]


def _flipped(block: Block) -> Block:
    return block._replace(shape="causal")
