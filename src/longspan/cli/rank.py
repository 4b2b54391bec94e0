"""One rank of a world: join, do the job under a watch, say how it ended, leave."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from longspan.spec.run import RunConfig
from longspan.train.failure.heartbeat import Heartbeat
from longspan.train.failure.records import FailureFolder, failure_of
from longspan.train.failure.watch import Watch
from longspan.train.groups import Groups

__all__ = ["Job", "Place", "choose_device", "use_threads", "work"]

Job = Callable[..., Any]
"""job(config, groups, *arguments), run by every rank; a top-level function."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: global rank.
        world: ranks in all.
        local_rank: number among the ranks of this machine.
        local_world: ranks of this machine.
        failures: what the ranks tell each other when one fails.
        port: of the store on this machine through which the ranks meet; None to meet as the environment says.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    failures: FailureFolder
    port: int | None = None


def work(place: Place, say: Callable[[], None], job: Job, config: RunConfig, *arguments: Any) -> Any:
    """What the job returns on this rank.

    Args:
        place: this rank's.
        say: called before the watch ends this process.
        job: called with the configuration, the groups of this rank and the arguments.
        config: the run.
        *arguments: passed on.

    Raises:
        Exception: whatever the job raised, after it is on record.
    """
    config.layout.check_world(place.world)
    place.failures.join(place.rank)
    heartbeat = Heartbeat(on_step=partial(place.failures.note_step, place.rank))
    watch = Watch(place.failures, place.rank, config.train.timeout_s, heartbeat, say)
    try:
        groups = _join(place, config)
        watch.start()
        result = job(config, replace(groups, heartbeat=heartbeat), *arguments)
    except Exception as error:
        # The process must end at once, so that the other ranks learn of it: no group is closed.
        place.failures.write(failure_of(error, place.rank, heartbeat.step))
        raise
    watch.stop()
    place.failures.leave(place.rank)
    dist.destroy_process_group()
    return result


def _join(place: Place, config: RunConfig) -> Groups:
    use_threads(config, place.local_world)
    device, timeout = choose_device(), timedelta(seconds=config.train.timeout_s)
    if device == "cuda":
        torch.cuda.set_device(place.local_rank)
    backend = "nccl" if device == "cuda" else "gloo"
    if place.port is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout
        )
    layout = replace(config.layout, ranks_per_node=config.layout.ranks_per_node or place.local_world)
    return Groups.create(layout, device, timeout)


def choose_device() -> str:
    """Where ranks of this machine compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_threads(config: RunConfig, local_world: int) -> None:
    """Compute with the threads that the run asks for, or with this process's share of the cores."""
    torch.set_num_threads(config.train.threads or max(1, len(os.sched_getaffinity(0)) // local_world))
