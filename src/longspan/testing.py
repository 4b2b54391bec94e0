"""Runs a function on several real processes, for tests and small experiments.

Starting torch in fresh processes for each case would cost seconds; one pool of ranks per world size is
therefore kept for the life of the calling process. A rank never re-initialises its default group (DTensor
caches group names), so a pool in which anything went wrong is killed and forked anew on the next call.

Known shortfalls: gloo on one machine only; not for use from several threads at once; a script that calls
`run_ranks` must guard its entry with `if __name__ == "__main__":`, as for any use of multiprocessing.
"""

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.errors import RankError

__all__ = ["cached_mesh", "run_ranks"]

Result = TypeVar("Result")

# Imported once, before the ranks fork; a name that cannot be imported is passed over.
_PRELOAD = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "longspan.data",
    "longspan.model",
    "pytest",
    "hypothesis",
]
_GROUP_TIMEOUT = timedelta(seconds=30)
# After a first failure the other ranks' reports, if any, arrive within this time.
_GRACE_S = 0.3


def run_ranks(fn: Callable[..., Result], world: int, *args: Any, timeout_s: float = 120.0) -> list[Result]:
    """Results of `fn(rank, world, *args)`, run by `world` processes that share a gloo group, in rank order.

    Each rank computes on one thread and starts the call with `torch.manual_seed(0)`. The first call for a
    world size takes a few seconds; later ones reuse its processes, whose modules and caches stay as earlier
    calls left them.

    Args:
        fn: a function that pickle can name (top level of an importable module), or a partial of one.
        world: number of ranks, at least 1; one rank also runs in a process of its own.
        *args: further arguments, the same for every rank; pickled, as are the results.
        timeout_s: seconds to wait for all ranks; a collective that hangs ends by itself after 30 s.

    Raises:
        RankError: a rank raised, died, or did not answer in time; names the rank that failed first, with its
            traceback as a note. All ranks of that world are then killed, and the next call starts new ones.
        TypeError: `fn` or an argument cannot be pickled.
    """
    try:
        job = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"run_ranks needs a top-level function and plain arguments: {error}") from error
    pool = _POOLS.get(world)
    if pool is None:
        pool = _POOLS[world] = _Pool.start(world)
    try:
        return pool.run(job, timeout_s)
    except BaseException:
        del _POOLS[world]
        pool.kill()
        raise


@functools.cache
def cached_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The CPU device mesh of this shape, made once per rank process.

    Use it inside functions given to `run_ranks`: making new groups for every case would pile up threads in
    ranks that live for the whole test run. All ranks must ask for the same meshes in the same order.

    Args:
        shape: axis sizes, whose product is the world size.
        names: axis names, slowest axis first.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass(frozen=True)
class _Report:
    """What one rank sent back; `value` is the result, or the traceback when it failed."""

    failed: bool
    time_ns: int
    headline: str
    value: Any


@dataclass(frozen=True)
class _Pool:
    """The processes of one world, with a pipe to each and the store through which they met."""

    processes: list[BaseProcess]
    connections: list[Connection]
    store: dist.TCPStore
    traces: tempfile.TemporaryDirectory

    @classmethod
    def start(cls, world: int) -> "_Pool":
        if world < 1:
            raise ValueError(f"run_ranks needs at least 1 rank, got {world}")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        traces = tempfile.TemporaryDirectory(prefix="longspan-ranks-")
        processes, connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world, store.port, traces.name),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return cls(processes, connections, store, traces)

    def run(self, job: bytes, timeout_s: float) -> list[Any]:
        for connection in self.connections:
            # A rank that died since the last call is found, with its exit code, in _collect.
            with suppress(ConnectionError):
                connection.send_bytes(job)
        deadline = time.monotonic() + timeout_s
        reports: dict[int, _Report] = {}
        while len(reports) < len(self.processes):
            arrived = self._collect(reports, deadline - time.monotonic())
            if not arrived:
                raise self._hang(reports, timeout_s)
            if any(report.failed for report in arrived):
                while self._collect(reports, _GRACE_S):
                    pass
                raise self._failure(reports)
        return [reports[rank].value for rank in range(len(self.processes))]

    def _collect(self, reports: dict[int, _Report], timeout_s: float) -> list[_Report]:
        """Adds to `reports` what arrives until the first ones do; nothing means that the time was up."""
        waiting = [rank for rank in range(len(self.processes)) if rank not in reports]
        pending: dict[Any, int] = {self.connections[rank]: rank for rank in waiting}
        arrived = []
        for connection in wait(list(pending), max(timeout_s, 0.0)) if pending else []:
            rank = pending[connection]
            reports[rank] = self._receive(rank)
            arrived.append(reports[rank])
        return arrived

    def _receive(self, rank: int) -> _Report:
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            process = self.processes[rank]
            process.join(_GRACE_S)
            # Time 0: a rank that vanished comes before those that only saw its connections close.
            return _Report(True, 0, f"the process died (exit code {process.exitcode})", self._trace(rank))

    def _failure(self, reports: dict[int, _Report]) -> RankError:
        failed = [rank for rank, report in reports.items() if report.failed]
        rank = min(failed, key=lambda rank: reports[rank].time_ns)
        error = RankError(f"rank {rank} of {len(self.processes)} failed: {reports[rank].headline}")
        error.add_note(reports[rank].value)
        return error

    def _hang(self, reports: dict[int, _Report], timeout_s: float) -> RankError:
        world = len(self.processes)
        pending = [rank for rank in range(world) if rank not in reports]
        for rank in pending:
            pid = self.processes[rank].pid
            assert pid is not None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_GRACE_S)
        error = RankError(f"ranks {pending} of {world} did not answer within {timeout_s:g} s")
        error.add_note("\n".join(f"rank {rank} was here:\n{self._trace(rank)}" for rank in pending))
        return error

    def _trace(self, rank: int) -> str:
        path = _trace_path(self.traces.name, rank)
        # A rank that fails while it starts, such as in an unguarded script, has not made its file yet.
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.traces.cleanup()


# The one piece of state in this module: the living pools, by world size.
_POOLS: dict[int, _Pool] = {}


def _trace_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.txt"


def _serve(connection: Connection, rank: int, world: int, port: int, trace_folder: str) -> None:
    """Body of a rank's process: answers jobs until the caller's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with _trace_path(trace_folder, rank).open("w") as trace:
        # Written from C, so that a rank inside a collective can still say where it is.
        faulthandler.enable(trace, all_threads=False)
        faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_GROUP_TIMEOUT)
        while True:
            try:
                job = connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            connection.send_bytes(_answer(job, rank, world))


def _answer(job: bytes, rank: int, world: int) -> bytes:
    try:
        fn, args = pickle.loads(job)
        torch.manual_seed(0)
        # Plain pickle copies tensors; the connection's own would pass shared memory that outlives the call.
        return pickle.dumps(_Report(False, time.time_ns(), "", fn(rank, world, *args)))
    except BaseException as error:
        headline = traceback.format_exception_only(error)[-1].strip()
        return pickle.dumps(_Report(True, time.time_ns(), headline, traceback.format_exc()))
