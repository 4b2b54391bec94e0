"""The same attention by other libraries, each driven through its own public entry.

What a library cannot do on this machine is found by trying it, so that a later version is timed as soon as it can.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.sides import Attend, Case, Place, Side

# t this rank's tokens, H query heads, K key/value heads, D head size


def _ringmaster(case: Case, place: Place, packed: bool = False, **settings: str) -> Attend:
    """The attention function that ringmaster registers with transformers.

    Args:
        case: what is computed.
        place: this rank's place.
        packed: say that the row is packed documents, of which there is one.
        settings: fields of its `RingmasterConfig`.
    """
    import ringmaster as rm
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = rm.RingmasterConfig(
        size=case.world,
        backend=rm.Backend(settings["backend"]),
        rotate_method=rm.RotateMethod(settings.get("rotate_method", "allgather")),
        load_balance=rm.LoadBalance(settings.get("load_balance", "none")),
    )
    inner = "sdpa" if case.device == "cpu" or settings["backend"] == "ulysses" else "flash_attention_2"
    mesh = DeviceMesh.from_group(place.group, case.device, mesh_dim_names=("cp",))
    runtime = rm.setup(
        config, num_kv_heads=case.kv_heads, device_mesh=mesh, device_type=case.device, inner_attn=inner
    )
    if packed:
        runtime.varlen = (torch.tensor([0, case.sequence], dtype=torch.int32), case.sequence)
    function: Any = ALL_ATTENTION_FUNCTIONS[runtime.attn_implementation]
    module = _Layer(case.heads // case.kv_heads)

    def attend(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_tHD, k_tKD, v_tKD))
        return function(module, q, k, v, None, scaling=case.dim**-0.5, is_causal=True)[0][0]

    return attend


class _Layer(nn.Module):
    """What an attention function of transformers reads off the layer that calls it."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


def _yunchang(case: Case, place: Place, ulysses: int, ring: int, impl: str) -> Attend:
    """Yunchang's hybrid attention with a kernel that needs no flash-attn."""
    import yunchang
    from yunchang.kernels import AttnType

    yunchang.set_seq_parallel_pg(ulysses, ring, place.rank, case.world)
    kernel = AttnType.TORCH_MATH if case.device == "cpu" else AttnType.TORCH_FLASH
    layer = yunchang.LongContextAttention(ring_impl_type=impl, attn_type=kernel)

    def attend(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor) -> Tensor:
        return layer(q_tHD[None], k_tKD[None], v_tKD[None], causal=True)[0]

    return attend


def _yunchang_ulysses(case: Case, place: Place) -> Attend:
    return _yunchang(case, place, ulysses=case.world, ring=1, impl="basic")


def _yunchang_ring(case: Case, place: Place, impl: str) -> Attend:
    return _yunchang(case, place, ulysses=1, ring=case.world, impl=impl)


ONE_DOCUMENT = "its path for packed rows, with one document"

PEERS = (
    Side("ringmaster ulysses", "contiguous", partial(_ringmaster, backend="ulysses"), "its default"),
    Side(
        "ringmaster ring, all-gather", "contiguous", partial(_ringmaster, backend="ring"), "its default ring"
    ),
    Side(
        "ringmaster ring, all-gather, packed",
        "contiguous",
        partial(_ringmaster, backend="ring", packed=True),
        ONE_DOCUMENT,
    ),
    Side(
        "ringmaster ring, point to point",
        "contiguous",
        partial(_ringmaster, backend="ring", rotate_method="alltoall"),
        "explicit softmax on a CPU",
    ),
    Side(
        "ringmaster ring, distflash",
        "contiguous",
        partial(_ringmaster, backend="ring", load_balance="distflash"),
        "explicit softmax on a CPU",
    ),
    Side(
        "ringmaster ring, zigzag",
        "zigzag",
        partial(_ringmaster, backend="ring", load_balance="head_tail"),
    ),
    Side(
        "ringmaster ring, zigzag, packed",
        "zigzag",
        partial(_ringmaster, backend="ring", load_balance="head_tail", packed=True),
        f"{ONE_DOCUMENT}; explicit softmax",
    ),
    Side("yunchang ulysses", "contiguous", _yunchang_ulysses, "torch's math attention on a CPU"),
    Side(
        "yunchang ring",
        "contiguous",
        partial(_yunchang_ring, impl="basic"),
        "torch's math attention on a CPU",
    ),
    Side(
        "yunchang ring, zigzag",
        "zigzag",
        partial(_yunchang_ring, impl="zigzag"),
        "torch's math attention on a CPU",
    ),
)
