"""Counts the bytes of living tensor storages, where no allocator does it for us."""

import resource
import sys
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Peak", "StorageCensus", "measure_peak", "peak_rss_bytes"]


class StorageCensus(TorchDispatchMode):
    """Live and peak bytes of the tensor storages that operations touch while this mode is on.

    Use it as a context around a step on the CPU; on CUDA the allocator counts for free. A storage counts
    once, however many views it has, from the first operation that reads or makes it until it dies. The mode
    runs Python code for every operation, forward and backward, so keep it to a few chosen steps and never
    time them.

    Known shortfalls: scratch memory inside a kernel is not a tensor and is not seen; the new size of a
    storage that was resized outside any operation is noticed when the next operation touches it.

    Args:
        known: tensors that live already and count from the start, such as weights and optimizer states.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref] = {}
        for tensor in known:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and counts its tensors; of a DTensor, the local operations inside it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        # Also the storage of the fake tensors with which DTensor works out shapes.
        if storage.device.type == "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        if key not in self._watches:
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
        del self._watches[key]


@dataclass
class Peak:
    """What `measure_peak` found; `num_bytes` is None until its block ends."""

    source: Literal["census", "allocator"]
    num_bytes: int | None = None


@contextmanager
def measure_peak(device: torch.device, known: Iterable[torch.Tensor] = ()) -> Generator[Peak]:
    """Peak bytes of living tensor storages within the block: the allocator's on CUDA, our census elsewhere.

    Args:
        device: where the block computes.
        known: tensors that live already; the census counts these from the start (the allocator knows them).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        peak = Peak("allocator")
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device)
    else:
        peak = Peak("census")
        with StorageCensus(known) as census:
            yield peak
        peak.num_bytes = census.peak_bytes


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, with interpreter, libraries and caches."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
