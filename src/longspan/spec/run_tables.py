"""The layers of a run before it is checked: defaults, the file, and what the command line replaces."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.spec.layout import expand
from longspan.spec.run_sections import BYTES, STDLIB

Table = dict[str, Any]

# Keys whose values are paths, which in a file are relative to its folder.
PATH_KEYS = ("model.config", "model.weights", "data.source", "data.tokenizer", "output.folder")


def read_table(file: Path) -> Table:
    """The TOML table of a run file, its paths taken from the file's folder.

    Raises:
        ConfigError: a file that cannot be read or is not TOML.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the run file: {error.strerror}") from None
    except ValueError as error:  # Not TOML (the message says which line), or not UTF-8.
        raise ConfigError(f"not a TOML file: {error}") from None
    for key in PATH_KEYS:
        section, name = key.split(".")
        values = table.get(section)
        if isinstance(values, dict) and name in values:
            values[name] = _taken_from(file.parent, values[name])
    return table


def _taken_from(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_taken_from(folder, path) for path in value]
    return str(folder / value) if isinstance(value, str) and value not in ("", STDLIB, BYTES) else value


def nested(overrides: Mapping[str, Any]) -> Table:
    """A table from values by dotted key."""
    table: Table = {}
    for key, value in overrides.items():
        *sections, name = key.split(".")
        branch: Table = {name: value}
        for section in reversed(sections):
            branch = {section: branch}
        table = _over(table, branch)
    return table


def merged(*layers: Table) -> Table:
    """All layers as one table; a later layer wins.

    Raises:
        ConfigError: a layer whose sizes contradict each other.
    """
    table: Table = {}
    for layer in layers:
        layout = layer.get("layout")
        if isinstance(layout, dict):
            # Before merging, or cp of one layer would meet cp_inner of another.
            layer = layer | {"layout": expand(layout)}
        stages = layer.get("stages")
        if isinstance(stages, dict):
            layer = layer | {"stages": _stages(table.get("stages"), stages)}
        table = _over(table, layer)
    return table


def _stages(below: Any, changes: Table) -> Any:
    """A list of stages with some keys of some of them replaced, as in {"2": {"steps": 50}}."""
    stages = list(below) if isinstance(below, list) else []
    for number, change in changes.items():
        if not number.isdecimal() or not 1 <= int(number) <= len(stages):
            raise ConfigError(
                f"stages.{number}: the run has {len(stages)} stages; write the number of one of them, as in "
                "stages.1.steps"
            )
        stage = stages[int(number) - 1]
        both = isinstance(stage, dict) and isinstance(change, dict)
        stages[int(number) - 1] = _over(stage, change) if both else change
    return stages


def _over(below: Table, above: Table) -> Table:
    both = {
        key: _over(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return below | above | both
