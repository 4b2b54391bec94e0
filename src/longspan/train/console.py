"""Training as a person watches it: a table that grows by a line for each logged step and each evaluation, and a bar."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from longspan.train.metrics import EvaluationRecord, StepRecord

__all__ = ["StepTable", "notes"]

# Header, width and content of each column; units stand in the header.
_COLUMNS: list[tuple[str, int, Callable[[StepRecord], str]]] = [
    ("step", 6, lambda record: str(record.step)),
    ("loss", 8, lambda record: f"{record.loss:.4f}"),
    ("|gradient|", 10, lambda record: f"{record.grad_norm:.3g}"),
    ("lr", 8, lambda record: f"{record.lr:.2e}"),
    ("tokens/s", 9, lambda record: f"{record.tokens_per_s:,.0f}"),
    ("GFLOP/s", 8, lambda record: f"{record.useful_flops_per_s / 1e9:,.1f}"),
    ("wait", 5, lambda record: f"{record.wait_share:.0%}"),
    ("peak MiB", 8, lambda record: "" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:,.0f}"),
]


def notes(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line to stderr, or nothing if quiet."""
    console = Console(stderr=True, highlight=False)
    return lambda text: None if quiet else console.print(text, markup=False, soft_wrap=True)


class StepTable:
    """Prints steps and evaluations to stderr, or to the given console, while it is open as a context.

    A terminal also gets a progress bar; anywhere else the table alone is written, so that a log stays readable.

    Args:
        total_steps: steps of the whole run, for the time that is left.
        log_every: steps between lines; the first, the last and all evaluations are always printed.
        console: where to print.
    """

    def __init__(self, total_steps: int, log_every: int = 1, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn("{task.completed}/{task.total} steps"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total_steps)
        self._first: tuple[int, float] | None = None
        self._has_header = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def write(self, record: StepRecord | EvaluationRecord) -> None:
        """Show a step or an evaluation that has just ended."""
        if not self._has_header:
            self._has_header = True
            self._print(*(header.rjust(width) for header, width, _ in _COLUMNS), "    left")
        if isinstance(record, EvaluationRecord):
            self._print(_evaluation(record))
        else:
            if record.skipped:
                self._print(f"{record.nonfinite}; the weights stay as they are")
            self._write_step(record)

    def _write_step(self, record: StepRecord) -> None:
        now = time.monotonic()
        starting = self._first is None
        if self._first is None:
            self._first = (record.step, now)
        self._bar.update(self._task, completed=record.step)
        last = record.step == self._total_steps
        if starting or last or record.step % self._log_every == 0:
            cells = (content(record).rjust(width) for _, width, content in _COLUMNS)
            self._print(*cells, self._left(record.step, now).rjust(8))

    def _left(self, step: int, now: float) -> str:
        """Time to the end at the pace since the first step, whose own time is left out: it includes warming up."""
        first_step, first_time = self._first or (step, now)
        if step == first_step:
            return ""
        seconds = (now - first_time) / (step - first_step) * (self._total_steps - step)
        return str(timedelta(seconds=round(seconds)))

    def _print(self, *cells: str) -> None:
        self._console.print(" ".join(cells), markup=False, soft_wrap=True)


def _evaluation(record: EvaluationRecord) -> str:
    """One line, its step and loss under those of the steps."""
    return (
        f"{record.step:6} {record.loss:8.4f} held out; by position {_buckets(record.loss_by_position)}; "
        f"by document length {_buckets(record.loss_by_document_length)}"
    )


def _buckets(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{bucket} {loss:.3f}" for bucket, loss in losses.items())
