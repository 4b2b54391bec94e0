"""Counting the time that the collectives of DTensor and FSDP wait, for which torch 2.13 has no hook."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import _functional_collectives

from longspan.attention import Meter

__all__ = ["counting_waits"]


_BLOCKING = (
    (_functional_collectives, "wait_tensor"),
    (dist, "all_gather_single"),
    (dist, "reduce_scatter_single"),
    (dist, "all_reduce"),
)


@contextmanager
def counting_waits(meter: Meter) -> Generator[None]:
    """Add to `meter` the seconds that tensor and data parallelism's collectives make this host wait inside the block.

    On CUDA a wait only orders streams, so the host hardly waits and the share reads near zero.
    """
    # TODO: drop the patches once these collectives can be timed through a public hook.
    with ExitStack() as patches:
        for module, name in _BLOCKING:
            patches.enter_context(patch.object(module, name, _counted(getattr(module, name), meter)))
        yield


def _counted(collective: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        with meter.waiting():
            return collective(*arguments, **options)

    return counted
