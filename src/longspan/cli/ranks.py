"""Running a job on the ranks of a layout: here under torchrun, otherwise in processes that are started for it."""

import builtins
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from longspan import errors
from longspan.errors import LongspanError, RankError
from longspan.spec.run import RunConfig
from longspan.train.groups import Groups
from longspan.train.session import check_trainable

__all__ = ["on_ranks"]

Job = Callable[..., Any]
"""job(config, groups, *arguments), run by every rank; a top-level function."""

PRELOAD = [
    "longspan.cli.ranks",
    "longspan.verify",
    "longspan.train.loop",
    "torch.distributed.tensor.parallel",
]


def on_ranks(job: Job, config: RunConfig, *arguments: Any) -> Any:
    """What `job` returns on rank 0; None on the other ranks of a world that torchrun started.

    Args:
        job: run by every rank with its own groups.
        config: its layout says how many ranks there are.
        *arguments: passed on; pickled when processes are started.

    Raises:
        LongspanError: a run that cannot be trained, before any process starts; or what the job raised.
        RankError: the first failure of any rank, if it was none of these; a fault of ours has its traceback as a note.
    """
    check_trainable(config)
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}:
        return _on_this_rank(job, config, *arguments)
    if config.layout.world == 1:
        _use_threads(config, 1)
        return job(config, Groups.create(config.layout, _device()), *arguments)
    return _start(job, config, *arguments)


def _start(job: Job, config: RunConfig, *arguments: Any) -> Any:
    """Start local processes through torch's elastic launcher and wait for them."""
    # Each of these loggers has a level of its own; what they have to say is told in one line by `_first_failure`.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        launch = LaunchConfig(
            run_id="longspan",
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.layout.world,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            return elastic_launch(launch, _on_this_rank)(job, config, *arguments)[0]
        except ChildFailedError as error:
            raise _first_failure(error) from None
        except SignalException as stop:
            # As a shell counts a program that a signal ended.
            raise SystemExit(128 + stop.sigval) from None


def _on_this_rank(job: Job, config: RunConfig, *arguments: Any) -> Any:
    """Join the world that the environment describes, do the job, leave."""
    config.layout.check_world(int(os.environ["WORLD_SIZE"]))
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    _use_threads(config, local_world)
    device = _device()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=config.train.timeout_s)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    try:
        layout = replace(config.layout, ranks_per_node=config.layout.ranks_per_node or local_world)
        result = job(config, Groups.create(layout, device), *arguments)
        return result if dist.get_rank() == 0 else None
    finally:
        # An exception must end the process at once, so that the other ranks learn of it.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _use_threads(config: RunConfig, local_world: int) -> None:
    torch.set_num_threads(config.train.threads or max(1, len(os.sched_getaffinity(0)) // local_world))


def _first_failure(error: ChildFailedError) -> LongspanError:
    """The failure that came first; lost connections are only its echo on other ranks."""
    ranks = sorted(error.failures.items(), key=lambda item: (_is_echo(item[1]), item[1].timestamp))
    rank, failure = ranks[0]
    told, stack = _told(failure)
    name, _, words = told.partition(": ")
    kind = getattr(errors, name, None)
    if kind is not None:
        return kind(words)
    first = RankError(f"rank {rank} failed first: {told}")
    if stack and not issubclass(getattr(builtins, name, Exception), OSError):
        first.add_note(stack)
    return first


def _told(failure: ProcessFailure) -> tuple[str, str]:
    """What the rank said, and where it was; the launcher's reply is a table if an exception ended it, else words."""
    reply: Any = failure.message
    if isinstance(reply, dict):
        return reply["message"], reply["extraInfo"]["py_callstack"]
    return reply, ""


def _is_echo(failure: ProcessFailure) -> bool:
    told, _ = _told(failure)
    return failure.exitcode == -15 or "Connection closed" in told or "Connection reset" in told
