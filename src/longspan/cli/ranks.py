"""Running a job on the ranks of a layout: here under torchrun, otherwise in processes that are started for it."""

import os
import sys
import time
from typing import Any

from longspan.cli.first_error import Remains, first_error
from longspan.cli.launch import launch
from longspan.cli.rank import Job, Place, choose_device, use_threads, work
from longspan.errors import LongspanError
from longspan.spec.run import RunConfig
from longspan.train.failure.records import Failure, FailureFolder, process_state
from longspan.train.failure.watch import wake_stopped
from longspan.train.groups import Groups
from longspan.train.session import check_trainable

__all__ = ["on_ranks"]

# The records of other ranks arrive within this time, if at all.
RECORDS_S = 1.5
RECORDS_FOLDER = "failures"


def on_ranks(job: Job, config: RunConfig, *arguments: Any) -> Any:
    """What `job` returns on rank 0; None on the other ranks of a world that torchrun started.

    Args:
        job: run by every rank with its own groups.
        config: its layout says how many ranks there are.
        *arguments: passed on; pickled when processes are started.

    Raises:
        LongspanError: a run that cannot be trained, before any process starts; or what the job raised.
        RankError: the first failure of any rank, if it was none of these; a fault of ours has its traceback as a note.
        SystemExit: a signal ended the run.
    """
    check_trainable(config)
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
        return _under_torchrun(job, config, *arguments)
    if config.layout.world == 1:
        use_threads(config, 1)
        return job(config, Groups.create(config.layout, choose_device()), *arguments)
    return launch(job, config, *arguments)


def _under_torchrun(job: Job, config: RunConfig, *arguments: Any) -> Any:
    """Be the rank that the environment describes."""
    rank, world, local_rank, local_world = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    folder = FailureFolder(config.output.folder / RECORDS_FOLDER, world)
    place = Place(rank, world, local_rank, local_world, folder)

    def say() -> None:
        print("longspan:", _first_error(folder, rank), file=sys.stderr)
        wake_stopped(folder)

    try:
        result = work(place, say, job, config, *arguments)
    except Exception as error:
        own = folder.read().get(rank)
        if own is None or isinstance(error, LongspanError):
            raise
        raise _first_error(folder, rank) from None
    return result if rank == 0 else None


def _first_error(folder: FailureFolder, rank: int) -> LongspanError:
    """What this rank knows of the first failure, after it has given the others a moment to leave their records."""
    until = time.monotonic() + RECORDS_S
    while time.monotonic() < until and not _settled(folder, folder.read()):
        time.sleep(0.1)
    failures = folder.read()
    deaths = dict.fromkeys(
        folder.dead(), "its process is gone, and it said nothing; see its launcher's report"
    )
    silent = {}
    if any(failure.kind == "timeout" for failure in failures.values()):
        for other, pid in folder.members().items():
            if other not in failures and other not in deaths and other != rank:
                silent[other] = f"its process is in state {process_state(pid)} and said nothing"
    wake_stopped(folder)
    return first_error(Remains(failures, deaths, silent, folder.step))


def _settled(folder: FailureFolder, failures: dict[int, Failure]) -> bool:
    """Whether the first failure is on record already."""
    return any(not failure.is_echo for failure in failures.values()) or bool(folder.dead())
