"""Limits that keep the rooms small enough to read."""

import ast
from pathlib import Path

import pytest

import longspan

SOURCES = sorted(Path(longspan.__file__).parent.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_rooms_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    assert [(name, lines) for name, lines in lengths if lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_hidden_inputs(path: Path) -> None:
    """A library reads no environment outside the command line, and leaves the root logger alone."""
    tree = ast.parse(path.read_text())
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert names.isdisjoint({"logging.basicConfig", "np.random.seed", "warnings.filterwarnings"})
    if "cli" not in path.parts:
        assert names.isdisjoint({"os.environ", "os.getenv"})
