"""Block kernels behind one protocol, one file for each."""

from longspan.attention.kernels.choose import choose_kernel
from longspan.attention.kernels.cpu_flash import CpuFlash
from longspan.attention.kernels.cuda_flash import CudaFlash
from longspan.attention.kernels.protocol import Kernel
from longspan.attention.kernels.reference import Reference

__all__ = ["CpuFlash", "CudaFlash", "Kernel", "Reference", "choose_kernel"]
