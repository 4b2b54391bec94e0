"""Which kernel computes a call."""

import torch

from longspan.attention.kernels.cpu_flash import CpuFlash
from longspan.attention.kernels.cuda_flash import CudaFlash
from longspan.attention.kernels.protocol import Kernel
from longspan.attention.kernels.reference import Reference
from longspan.attention.score import Score
from longspan.errors import UnsupportedError

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), CudaFlash(), Reference())}
PLAIN = Score(1.0)


def choose_kernel(name: str, device: str, dtype: torch.dtype, score: Score = PLAIN) -> Kernel:
    """The kernel that a run file names; "auto" is the first fused kernel that can, or else explicit softmax.

    Args:
        name: "auto" or a kernel's name.
        device: "cpu" or "cuda".
        dtype: of q, k and v.
        score: how scores are made.

    Raises:
        UnsupportedError: an unknown name, or a kernel that cannot run on this device and dtype or with such scores.
    """
    probe = torch.empty(0, 1, 1, dtype=dtype, device=device)
    if name == "auto":
        return next(kernel for kernel in KERNELS.values() if kernel.refusal(probe, probe, score) is None)
    if name not in KERNELS:
        raise UnsupportedError(f"unknown kernel {name!r}; use auto, {', '.join(KERNELS)}")
    if reason := KERNELS[name].refusal(probe, probe, score):
        raise UnsupportedError(reason)
    return KERNELS[name]
