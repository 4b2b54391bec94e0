"""`--section.field value` on the command line becomes a value by dotted key."""

import tomllib
from collections.abc import Iterable
from typing import Annotated, Any

from cyclopts import Parameter

from longspan.errors import ConfigError

# A verb takes them as `*overrides: Override` and hands `parse_overrides(overrides)` to RunConfig.load.
Override = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="--section.field value pairs that replace values of the run file, as in --layout.tp 4.",
    ),
]


def parse_overrides(tokens: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key from `--key value`, `--key=value`, and `--key` alone for true.

    A value is read as TOML (4, 1e-3, true, ["a", "b"]); what is not TOML is a string.

    Raises:
        ConfigError: a value without a key, or a key given twice.
    """
    values: dict[str, Any] = {}
    waiting = list(tokens)
    while waiting:
        option, equals, text = waiting.pop(0).partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or not key:
            raise ConfigError(
                f"{option!r} has no key before it; write --section.field value, as in --layout.tp 4"
            )
        if not equals:
            text = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        if key in values:
            raise ConfigError(f"--{key} is given twice; give it once")
        values[key] = _value(text)
    return values


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.pop("value", text)
    return value if not parsed and isinstance(value, bool | int | float | str | list | dict) else text
