"""Counting the time that DTensor's collectives wait, for which torch 2.13 has no hook."""

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch.distributed import _functional_collectives

from longspan.attention import Meter

__all__ = ["counting_waits"]


@contextmanager
def counting_waits(meter: Meter) -> Generator[None]:
    """Add to `meter` the seconds that tensor parallelism's collectives make this host wait inside the block.

    On CUDA a wait only orders streams, so the host hardly waits and the share reads near zero.
    """
    # TODO: drop the patch once DTensor's collectives can be timed through a public hook.
    real = _functional_collectives.wait_tensor

    def counted(tensor: Tensor) -> Tensor:
        with meter.waiting():
            return real(tensor)

    with patch.object(_functional_collectives, "wait_tensor", counted):
        yield
