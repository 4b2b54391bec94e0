"""Where the records of steps and evaluations go: a JSONL file, TensorBoard, and the terminal."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.tensorboard import SummaryWriter

from longspan.spec.run import RunConfig
from longspan.train.console import StepTable
from longspan.train.metrics import EvaluationRecord, StepRecord, describe_run, json_ready, run_tags

__all__ = ["JsonlLog", "Record", "TensorBoardLog", "recording"]

Record = StepRecord | EvaluationRecord


@contextmanager
def recording(
    config: RunConfig,
    device: torch.device,
    *,
    rank: int,
    quiet: bool,
    resumed_from_step: int | None = None,
) -> Generator[Callable[[Record], None]]:
    """A function that writes a record everywhere the run asks for; on ranks other than 0 it does nothing.

    Args:
        config: tells the folder, whether TensorBoard is wanted, and how often to print.
        device: where this rank computes.
        rank: global rank.
        quiet: print nothing; the files are written all the same.
        resumed_from_step: steps taken before, by a run whose files are gone on with.
    """
    with ExitStack() as stack:
        logs: list[JsonlLog | TensorBoardLog | StepTable] = []
        if rank == 0:
            folder, run = config.output.folder, describe_run(config, device)
            run |= {"resumed_from_step": resumed_from_step}
            logs.append(JsonlLog(folder / "steps.jsonl", run, run_tags(config, device)))
            if config.output.tensorboard:
                logs.append(TensorBoardLog(folder / "tensorboard", run, resumed_from_step))
            if not quiet:
                logs.append(StepTable(config.stage_plan.steps, config.train.log_every))
        writers = [stack.enter_context(log).write for log in logs]

        def write(record: Record) -> None:
            for writer in writers:
                writer(record)

        yield write


class JsonlLog:
    """A file with one JSON object a line: the run, then what happens in it. It is appended to, never overwritten.

    Args:
        path: the file; folders above it are made.
        run: all about the run, written once with "kind": "run".
        tags: repeated in every further line, whose "kind" is "step" or "evaluation".
    """

    def __init__(self, path: Path, run: dict[str, Any], tags: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._tags = tags
        self._line({"kind": "run"} | run)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Add a record; it is on its way to the disk when this returns."""
        self._line({"kind": record.kind} | record.values() | self._tags)

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(json_ready(value), allow_nan=False) + "\n")
        self._file.flush()


class TensorBoardLog:
    """TensorBoard event files: every number of a record as a scalar over steps, and the run as text.

    Names of evaluations start with "eval_", as in "eval_loss_by_position/4096-16383".

    Args:
        folder: the folder to give to `tensorboard --logdir`.
        run: all about the run.
        resumed_from_step: hides what an earlier process wrote of the steps after it.
    """

    def __init__(self, folder: Path, run: dict[str, Any], resumed_from_step: int | None = None) -> None:
        purge_step = None if resumed_from_step is None else resumed_from_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._writer.add_text("run", f"```\n{json.dumps(json_ready(run), indent=2)}\n```")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, record: Record) -> None:
        """Add a record."""
        prefix = "eval_" if isinstance(record, EvaluationRecord) else ""
        for name, value in _numbers(record.values()):
            self._writer.add_scalar(prefix + name, value, record.step)


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by name; those of a table by "table/name"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in value.items())
        elif isinstance(value, int | float):
            yield name, value
