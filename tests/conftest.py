"""Seeds, the skipping of GPU tests, and the log of the grids."""

import platform
import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# The same examples on every run, and no deadline: a busy machine is no failure.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--grid-log", type=Path, help="write outcome and worst error of each cell to this file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nondeterministic_on_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets GPU tests use the kernels that training uses, which deterministic mode would refuse."""
    on_gpu = "gpu" in request.keywords
    torch.set_deterministic_debug_mode("default" if on_gpu else "error")
    yield
    torch.set_deterministic_debug_mode("error")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--grid-log")
    if path is None:
        return
    reports = [
        (report.nodeid, outcome, dict(report.user_properties).get("worst_error"))
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" or outcome != "passed"
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(grid_log(sorted(reports)))
    terminalreporter.write_line(f"grid log: {path}")


def grid_log(reports: list[tuple[str, str, float | None]]) -> str:
    """A Markdown page with one row for each test and one for each cell.

    A cell states its worst error by `record_property("worst_error", value)`.
    """
    tests: dict[str, list[tuple[str, float | None]]] = {}
    for cell, outcome, error in reports:
        tests.setdefault(cell.split("[")[0], []).append((outcome, error))
    versions = ", ".join(f"{name} {version(name)}" for name in ("longspan", "torch", "transformers"))
    lines = [
        "# Grid log",
        "",
        f"Written by `make grid`: Python {platform.python_version()}, {versions}, {platform.machine()} CPU.",
        "",
        "| test | cells | passed | failed | skipped | worst error |",
        "|---|---|---|---|---|---|",
    ]
    for test, cells in tests.items():
        outcomes = [outcome for outcome, _ in cells]
        counts = " | ".join(str(outcomes.count(outcome)) for outcome in ("passed", "failed", "skipped"))
        worst = max((error for _, error in cells if error is not None), default=None)
        lines.append(f"| {test} | {len(cells)} | {counts} | {_figure(worst)} |")
    lines += ["", "| cell | outcome | worst error |", "|---|---|---|"]
    lines += [f"| {cell} | {outcome} | {_figure(error)} |" for cell, outcome, error in reports]
    return "\n".join(lines) + "\n"


def _figure(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"
