"""How verbs speak: one JSON value for programs, words and tables for people."""

import json
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

# Tables are cut to the terminal; what is not a terminal gets this many columns.
PIPE_WIDTH = 110

Flag = Annotated[bool, Parameter(show_default=False)]
Json = Annotated[
    bool, Parameter(show_default=False, help="Print one JSON value on stdout and nothing else there.")
]


def print_json(value: Any) -> None:
    """The one JSON value that a verb with --json leaves on stdout."""
    print(json.dumps(value, ensure_ascii=False))


def console(as_json: bool = False) -> Console:
    """Where words and tables for people go: stdout, or stderr when stdout carries JSON."""
    out = Console(stderr=as_json, highlight=False)
    if not out.is_terminal:
        out.width = PIPE_WIDTH
    return out


def table(*columns: str, uncut: int = 1) -> Table:
    """An empty table in the house style; its first columns stay whole on a narrow terminal."""
    empty = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in empty.columns[:uncut]:
        column.no_wrap = True
        column.min_width = len(str(column.header))
    return empty
