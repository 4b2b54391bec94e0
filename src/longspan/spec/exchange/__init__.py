"""The frozen program of one attention call: what moves, what is computed, forward and backward."""

from longspan.spec.exchange.build import TRANSPORTS, Transport, build, build_all, inner_size
from longspan.spec.exchange.heads import Heads, HeadSlice, Reshard, slice_heads
from longspan.spec.exchange.options import DEFAULT, Options
from longspan.spec.exchange.program import Exchange, Move, Step, Work

__all__ = [
    "DEFAULT",
    "TRANSPORTS",
    "Exchange",
    "HeadSlice",
    "Heads",
    "Move",
    "Options",
    "Reshard",
    "Step",
    "Transport",
    "Work",
    "build",
    "build_all",
    "inner_size",
    "slice_heads",
]
