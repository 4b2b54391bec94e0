"""Timing two sides against each other on one machine, and saying where the figures come from.

A machine is never the same for long: other processes come and go, and clocks change. So the two sides take turns, a
ratio is taken inside each pair of neighbours, and the median pair is reported with the least and the greatest.

Known shortfalls: CPU-seconds are those of the process (all its threads), not of the children that it starts.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
from cyclopts import App, CycloptsError, Parameter

from longspan.errors import LongspanError

MOST_LOAD = 0.5
FEWEST_PAIRS = 5
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("longspan", "torch", "transformers", "axolotl-ringmaster", "yunchang")

Work = Callable[[], object]


class Sample(NamedTuple):
    """One timed piece of work."""

    wall_s: float
    cpu_s: float


class Pair(NamedTuple):
    """What is measured and what it is measured against, one right after the other."""

    side: Sample
    yardstick: Sample


class Spread(NamedTuple):
    """Median of several figures, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        return cls(median(figures), min(figures), max(figures))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to measure and where to leave the table.

    Attributes:
        pairs: Timed pairs; at least 5 count.
        warmup: Pairs run before them.
        force: Measure although the machine is busy or the pairs are few; the table then says that it is noisy.
        wait_s: Seconds to wait for the machine to fall quiet.
        output: Folder of the table.
        json: Print the rows as one JSON value on stdout and nothing else there.
    """

    pairs: int = 7
    warmup: int = 2
    force: Annotated[bool, Parameter(negative=())] = False
    wait_s: float = 0.0
    output: Path = RESULTS
    json: Annotated[bool, Parameter(negative=())] = False

    def noise(self) -> str:
        """Why the figures to come are noisy; empty on a quiet machine with enough pairs.

        Raises:
            LongspanError: they would be noisy, and that was not asked for.
        """
        if self.pairs < 1 or self.warmup < 0:
            raise LongspanError(f"pairs={self.pairs}, warmup={self.warmup}: at least 1 and 0")
        reasons = []
        if self.pairs < FEWEST_PAIRS:
            reasons.append(f"{self.pairs} pairs are fewer than {FEWEST_PAIRS}")
        load = _falling_load(time.monotonic() + (0.0 if self.force else self.wait_s))
        if load > MOST_LOAD:
            reasons.append(f"the load was {load:.2f} before the start, over {MOST_LOAD}")
        noise = " and ".join(reasons)
        if noise and not self.force:
            raise LongspanError(
                f"{noise}; wait for it to fall with --wait-s 300, or take noisy figures with --force"
            )
        return noise


def _falling_load(deadline: float) -> float:
    """The 1-minute load average, once it is low or the deadline has passed."""
    while (load := os.getloadavg()[0]) > MOST_LOAD and time.monotonic() < deadline:
        say(f"the load is {load:.2f}, waiting for {MOST_LOAD}")
        time.sleep(5.0)
    return load


def time_call(work: Work, device: str) -> Sample:
    """Wall and CPU-seconds of one call, the device's own work included."""
    _synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    _synchronize(device)
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_pairs(
    side: Work, yardstick: Work, plan: Plan, device: str = "cpu", barrier: Work = lambda: None
) -> list[Pair]:
    """Time two sides in turns; which of them goes first alternates.

    Args:
        side: what is measured, on this rank.
        yardstick: what it is measured against.
        plan: how many pairs.
        device: "cpu" or "cuda".
        barrier: lets all ranks start each piece of work together.
    """
    pairs = []
    for number in range(-plan.warmup, plan.pairs):
        samples = {}
        for name, work in ((("side", side), ("yardstick", yardstick)))[:: 1 if number % 2 else -1]:
            barrier()
            samples[name] = time_call(work, device)
        if number >= 0:
            pairs.append(Pair(**samples))
    return pairs


def over_ranks(by_rank: Sequence[Sequence[Pair]]) -> list[Pair]:
    """The pairs of a whole world: as slow as its slowest rank, as costly as all of them."""
    return [
        Pair(
            *(
                Sample(max(s.wall_s for s in ranks), sum(s.cpu_s for s in ranks))
                for ranks in zip(*pairs, strict=True)
            )
        )
        for pairs in zip(*by_rank, strict=True)
    ]


def ratios(pairs: Sequence[Pair], ratio: Callable[[Pair], float]) -> dict[str, Any]:
    """What every table says of a ratio: its median with the least and greatest pair, and what it cost.

    Args:
        pairs: timed pairs.
        ratio: of one pair; which side stands above is the table's to say.
    """
    spread = Spread.of([ratio(pair) for pair in pairs])
    return {
        "ratio": spread.median,
        "ratio_least": spread.least,
        "ratio_greatest": spread.greatest,
        "cpu_ratio": median(pair.side.cpu_s / pair.yardstick.cpu_s for pair in pairs),
        "pairs": len(pairs),
    }


def environment(device: str) -> dict[str, Any]:
    """Machine and versions that a figure belongs to."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_or_auto(device: str) -> str:
    """The device that is meant; "auto" is the GPU where there is one.

    Raises:
        LongspanError: a GPU that is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise LongspanError("device=cuda: torch sees no GPU here; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


Columns = dict[str, Callable[[dict[str, Any]], str]]
"""How each column of a table is read off a row."""


def cell(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    """A column that shows one figure in one format, and nothing where there is none."""
    return lambda row: "" if row[key] is None else format(row[key], form)


RATIO_COLUMNS: Columns = {
    "ratio": cell("ratio", ".3f"),
    "least": cell("ratio_least", ".3f"),
    "greatest": cell("ratio_greatest", ".3f"),
    "CPU-seconds ratio": cell("cpu_ratio", ".3f"),
    "pairs": cell("pairs", "d"),
}
"""The columns of what `ratios` gives."""


def markdown(title: str, rows: Sequence[dict[str, Any]], columns: Columns) -> str:
    """A page with one table; `config`, `environment` and `noise` of the first row hold for all."""
    first = rows[0]
    lines = [f"# {title}", ""]
    if first["noise"]:
        lines += [f"**Noisy**: {first['noise']}. Not to be quoted.", ""]
    for name in ("config", "environment"):
        facts = (f"{key} {value}" for key, value in first[name].items() if value is not None)
        lines += [f"{name.capitalize()}: {', '.join(facts)}.", ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(read(row) for read in columns.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


def save(stem: str, value: Any, page: str, plan: Plan, noise: str) -> None:
    """Leave a result as JSON and as a page, or print it; a noisy one never replaces a quiet one."""
    stem += "_noisy" if noise else ""
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / f"{stem}.json").write_text(json.dumps(value, indent=1) + "\n")
    (plan.output / f"{stem}.md").write_text(page)
    print(json.dumps(value) if plan.json else page)
    say(f"left in {plan.output / stem}.md and .json")


def say(words: str) -> None:
    """Tell whoever watches what is going on."""
    print(words, file=sys.stderr, flush=True)


def run_command(command: Callable[..., None]) -> int:
    """Run a benchmark's command line; 2 and one line for what cannot be run."""
    app = App(default_command=command, result_action="return_value")
    try:
        app(exit_on_error=False, print_error=False)
    except (CycloptsError, LongspanError) as error:
        say(" ".join(str(error).split()))
        return 2
    return 0
