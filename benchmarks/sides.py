"""Causal attention of one sequence over several ranks: the yardstick, and ours.

T tokens of the sequence, t this rank's, H query heads, K key/value heads, D head size
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.attention import AttentionCall, Meter, Score, attend, choose_kernel
from longspan.spec.exchange import Transport, build, inner_size
from longspan.spec.mask import Mask
from longspan.spec.sharding import deal

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
WHOLE = "whole"
_TIMEOUT = timedelta(minutes=10)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(q_tHD, k_tKD, v_tKD) -> out_tHD."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is computed.

    Attributes:
        world: Ranks that share the sequence.
        sequence: Tokens T, one document.
        heads: Query heads H.
        kv_heads: Key/value heads K.
        dim: Head size D.
        dtype: float32, bfloat16 or float64.
        device: auto, cpu or cuda.
    """

    world: int = 2
    sequence: int = 8192
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: str = "float32"
    device: str = "auto"

    def config(self) -> dict[str, Any]:
        """The case as a row states it."""
        sizes = asdict(self)
        return {"cp": sizes.pop("world"), "sp": False, "threads_per_rank": 1, **sizes}

    def whole(self) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the output over the whole sequence, the same on every rank."""
        shape_TH, shape_TK = (self.sequence, self.heads), (self.sequence, self.kv_heads)
        shapes = (shape_TH, shape_TK, shape_TK, shape_TH)
        return tuple(torch.randn(*shape, self.dim).to(self.device, DTYPES[self.dtype]) for shape in shapes)


@dataclass(frozen=True)
class Place:
    """One rank's place.

    Attributes:
        rank: its number.
        group: all ranks, over the device's own backend.
        meeting: all ranks, over gloo, to start together.
    """

    rank: int
    group: dist.ProcessGroup
    meeting: dist.ProcessGroup

    @classmethod
    @cache
    def of(cls, rank: int, device: str) -> "Place":
        """This rank's place, with groups that wait longer than a test would."""
        if device == "cuda":
            torch.cuda.set_device(rank)
        meeting = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        group = dist.new_group(backend="nccl", timeout=_TIMEOUT) if device == "cuda" else meeting
        assert isinstance(meeting, dist.ProcessGroup) and isinstance(group, dist.ProcessGroup)
        # Communicators are opened at once: a ring's first message may be one-sided.
        dist.barrier(group)
        return cls(rank, group, meeting)


@dataclass(frozen=True)
class Side:
    """A way to compute the attention.

    Attributes:
        name: as its row says.
        sharding: which tokens a rank owns: "zigzag", "contiguous" or "whole".
        build: makes the function of one rank, before the clock runs.
        note: what the name cannot say.
    """

    name: str
    sharding: str
    build: Callable[[Case, Place], Attend]
    note: str = ""


def sdpa(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """The yardstick: torch's fused attention over the whole sequence in one process."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    grouped = q_THD.shape[1] != k_TKD.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)


def _ours(case: Case, place: Place, transport: Transport) -> Attend:
    mask, inner = Mask((0, case.sequence)), inner_size(transport, case.world)
    sharding = deal("zigzag", mask.cu_seqlens, 1, case.world, inner)
    group = place.group if case.world > 1 else None
    call = AttentionCall(
        exchange=build(mask, sharding, place.rank, transport),
        kernel=choose_kernel("auto", case.device, DTYPES[case.dtype]),
        score=Score(case.dim**-0.5),
        meter=Meter(),
        sequence=group if inner == 1 else None,
        heads=group if inner > 1 else None,
    )
    return partial(attend, call=call)


def _copy(case: Case, place: Place) -> Attend:
    return sdpa


# What the machine itself takes for using all of its cores: nothing is shared and nothing is sent.
COPIES = Side(
    "torch SDPA, a whole copy on every rank",
    WHOLE,
    _copy,
    "no exchange: the price of keeping all cores busy at once",
)
OURS = {
    "ring": Side("longspan ring", "zigzag", partial(_ours, transport="ring")),
    "all_gather": Side("longspan all-gather", "zigzag", partial(_ours, transport="all_gather")),
    "needed": Side("longspan needed rows", "zigzag", partial(_ours, transport="needed")),
    "all_to_all": Side("longspan all-to-all", "contiguous", partial(_ours, transport="all_to_all")),
}
