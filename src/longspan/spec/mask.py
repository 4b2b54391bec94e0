"""Which keys each query sees, over one flattened row of packed documents.

A micro-batch of several rows is one flattened row with more documents, so different documents in each row need no
second mechanism. A mask is data: document bounds and a band. No transport knows what "causal" or "packed" means.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longspan.errors import ConfigError


class Band(NamedTuple):
    """Bounds on (query position - key position) inside a document; None means unbounded."""

    lowest: int | None
    highest: int | None


@dataclass(frozen=True)
class Mask:
    """Attention inside documents, optionally causal, optionally only to the nearest keys.

    Args:
        cu_seqlens: document starts and the end, rising from 0 to the number of tokens T.
        causal: a query sees no later key.
        window: how many keys a query sees at most, itself included; None means all earlier ones. Needs `causal`.

    Raises:
        ConfigError: bounds that do not rise from 0, a window below 1, or a window without `causal`.
    """

    cu_seqlens: tuple[int, ...]
    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds and windows that describe no mask."""
        bounds = np.asarray(self.cu_seqlens)
        if len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) <= 0).any():
            raise ConfigError(f"cu_seqlens must rise from 0, got {self.cu_seqlens[:8]}; drop empty documents")
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ConfigError(f"window={self.window} needs causal=True and at least 1 key (the query itself)")

    @property
    def tokens(self) -> int:
        """Length T of the flattened row."""
        return self.cu_seqlens[-1]

    @property
    def band(self) -> Band:
        """The causal and window conditions as bounds on query minus key."""
        return Band(0 if self.causal else None, None if self.window is None else self.window - 1)

    @cached_property
    def bounds(self) -> np.ndarray:
        """`cu_seqlens` as an int64 array, shape (documents + 1,)."""
        return np.asarray(self.cu_seqlens, dtype=np.int64)

    def pairs(self) -> int:
        """Number of (query, key) pairs that attention computes, exactly."""
        lengths = np.diff(self.bounds)
        if not self.causal:
            return int((lengths**2).sum())
        reach = lengths if self.window is None else np.minimum(lengths, self.window)
        # The first `reach` queries see 1, 2, ... keys; the rest see `reach` each.
        return int((reach * (reach + 1) // 2 + (lengths - reach) * reach).sum())

    def key_range(self, document: int, start: int, stop: int) -> tuple[int, int]:
        """Smallest key range [first, last) that holds all keys seen by queries [start, stop) of one document."""
        first, last = self.cu_seqlens[document], self.cu_seqlens[document + 1]
        if self.window is not None:
            first = max(first, start - self.window + 1)
        return first, (stop if self.causal else last)
