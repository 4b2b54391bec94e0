"""Buckets of token counts: how much context a token had, or how long its document is."""

from itertools import pairwise
from typing import overload

import numpy as np
import torch

POSITION_EDGES = (256, 1024, 4096, 16384, 65536, 262144)


@overload
def position_buckets(positions: np.ndarray, edges: tuple[int, ...] = ...) -> np.ndarray: ...
@overload
def position_buckets(positions: torch.Tensor, edges: tuple[int, ...] = ...) -> torch.Tensor: ...
def position_buckets(positions, edges=POSITION_EDGES):
    """Bucket of each position, int64: how many edges it has reached.

    Args:
        positions: places in their pieces, int, any shape; an array or a tensor, and so is the result.
        edges: first position of each bucket but the first, rising.
    """
    if isinstance(positions, torch.Tensor):
        return torch.bucketize(positions, torch.tensor(edges, device=positions.device), right=True)
    return np.searchsorted(np.array(edges), positions, side="right")


def bucket_names(edges: tuple[int, ...] = POSITION_EDGES) -> tuple[str, ...]:
    """Ranges of positions such as "0-255", the last one open such as "262144+"; one more than the edges."""
    return *(f"{first}-{after - 1}" for first, after in pairwise((0, *edges))), f"{edges[-1]}+"
