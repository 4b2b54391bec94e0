"""Turns careless code into failures, in the test process and in every rank that imports a test module."""

import ipaddress
import socket
from typing import Any

import torch


def install() -> None:
    """Poisons uninitialised memory with NaN, bans the network beyond loopback, and takes one thread."""
    # Deterministic mode is what makes torch fill the result of empty, empty_like, new_empty and resize_.
    torch.set_deterministic_debug_mode("error")
    torch.set_num_threads(1)
    socket.socket = _LoopbackSocket


class _LoopbackSocket(socket.socket):
    def connect(self, address: Any, /) -> None:
        _refuse_remote(self, address)
        super().connect(address)

    def connect_ex(self, address: Any, /) -> int:
        _refuse_remote(self, address)
        return super().connect_ex(address)


def _refuse_remote(connecting: socket.socket, address: Any) -> None:
    if connecting.family not in (socket.AF_INET, socket.AF_INET6):
        return
    host = address[0]
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise PermissionError(f"tests may not use the network, and this one wanted {host}")
