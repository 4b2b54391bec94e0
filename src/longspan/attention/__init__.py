"""Exact attention over a sequence that several ranks share."""

from longspan.attention.engine import AttentionCall, attend
from longspan.attention.kernels import Kernel, choose_kernel
from longspan.attention.meter import Meter
from longspan.attention.score import Score

__all__ = ["AttentionCall", "Kernel", "Meter", "Score", "attend", "choose_kernel"]
