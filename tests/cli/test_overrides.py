"""Words of the command line become typed values by dotted key."""

from typing import Any

import pytest

from longspan.cli.overrides import parse_overrides
from longspan.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--layout.tp", "4", "--data.sequence=8192"], {"layout.tp": 4, "data.sequence": 8192}),
        (["--layout.sp", "--layout.tp", "2"], {"layout.sp": True, "layout.tp": 2}),
        (["--layout.sp", "false"], {"layout.sp": False}),
        (["--optimizer.lr", "-1"], {"optimizer.lr": -1}),
        (["--optimizer.lr=3e-4"], {"optimizer.lr": 3e-4}),
        (["--data.eval-documents", "0.5"], {"data.eval_documents": 0.5}),
        (["--train.dtype", "bfloat16"], {"train.dtype": "bfloat16"}),
        (["--data.source", '["a", "b"]'], {"data.source": ["a", "b"]}),
        (["--data.source", "my-docs/a=b"], {"data.source": "my-docs/a=b"}),
        (["--data.source=my-docs/a=b"], {"data.source": "my-docs/a=b"}),
        (["--output.folder", "2026-01-02"], {"output.folder": "2026-01-02"}),
        (["--output.folder", "1\nx = 2"], {"output.folder": "1\nx = 2"}),
        (["--output.folder="], {"output.folder": ""}),
        (["--output.folder", '"7"'], {"output.folder": "7"}),
        ([], {}),
    ],
    ids=repr,
)
def test_values(words: list[str], values: dict[str, Any]) -> None:
    assert parse_overrides(words) == values


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["4"], "'4' has no key before it"),
        (["--layout.tp", "4", "8"], "'8' has no key before it"),
        (["-x", "4"], "'-x' has no key before it"),
        (["--=4"], "'--' has no key before it"),
        (["--layout.tp", "4", "--layout.tp=2"], "--layout.tp is given twice"),
    ],
    ids=repr,
)
def test_refusals(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        parse_overrides(words)
