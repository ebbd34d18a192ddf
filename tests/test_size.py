"""Files, functions and classes stay small enough to be read in one go.

What is larger says why in a comment `# size: ...` on the line above it (a file: among its first
lines).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rollpacker"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_ATTRIBUTES = 16


def too_large(source: str) -> Iterator[str]:
    lines = source.splitlines()
    if len(lines) > MAX_FILE_LINES and not any(line.startswith("# size: ") for line in lines[:25]):
        yield f"{len(lines)} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES and not _has_reason(node, lines):
                yield f"{node.name}: {length} lines"
        elif isinstance(node, ast.ClassDef):
            number = len(attributes(node))
            if number > MAX_ATTRIBUTES and not _has_reason(node, lines):
                yield f"{node.name}: {number} attributes"


def _has_reason(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]):
    """The comment stands above the decorators, if there are some."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    above = first - 2
    while above >= 0 and lines[above].lstrip().startswith("#"):
        if lines[above].lstrip().startswith("# size: "):
            return True
        above -= 1
    return False


def attributes(node: ast.ClassDef) -> set[str]:
    """Annotated fields, and what is assigned to `self`."""
    fields = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    stored = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    return fields | stored


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_it_can_be_read_in_one_go(path: Path) -> None:
    assert list(too_large(path.read_text())) == []


def test_the_check_finds_what_it_should() -> None:
    long = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    wide = "class C:\n" + "".join(f"    a{n}: int\n" for n in range(MAX_ATTRIBUTES + 1))
    assert list(too_large(long)) == [f"f: {MAX_FUNCTION_LINES + 1} lines"]
    assert list(too_large(wide)) == [f"C: {MAX_ATTRIBUTES + 1} attributes"]
    assert list(too_large("x = 1\n" * (MAX_FILE_LINES + 1))) == [f"{MAX_FILE_LINES + 1} lines"]
    for source in (long, wide):
        assert list(too_large("# size: one row for each of them\n" + source)) == []
