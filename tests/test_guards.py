"""The guards themselves, in this process and in the ranks; and the page that the grids leave behind."""

import socket

import pytest
import torch

from longspan.testing import run_ranks
from tests.conftest import grid_log


def empties_are_nan(rank: int, world: int) -> bool:
    makers = [torch.empty(5), torch.empty_like(torch.ones(5)), torch.ones(5).new_empty(5)]
    return all(tensor.isnan().all() for tensor in makers)


def calls_home(rank: int, world: int) -> str:
    with pytest.raises(PermissionError) as caught:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    return str(caught.value)


def test_uninitialised_memory_is_nan_everywhere() -> None:
    assert empties_are_nan(0, 1)
    assert run_ranks(empties_are_nan, 2) == [True, True]


def test_network_is_banned_everywhere() -> None:
    assert "192.0.2.1" in calls_home(0, 1)
    assert all("192.0.2.1" in message for message in run_ranks(calls_home, 2))


def test_loopback_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()[:2], timeout=5).close()


def test_grid_log_counts_cells_and_keeps_the_worst_error() -> None:
    page = grid_log(
        [("t.py::a[1]", "passed", 1e-15), ("t.py::a[2]", "failed", 2e-3), ("t.py::b", "skipped", None)]
    )
    assert "| t.py::a | 2 | 1 | 1 | 0 | 2.0e-03 |" in page
    assert "| t.py::b | 1 | 0 | 0 | 1 |  |" in page
    assert "| t.py::a[1] | passed | 1.0e-15 |" in page
