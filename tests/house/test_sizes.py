"""Functions and files stay small enough to be read, and the rooms where most happens say why.

There is no limit on the lines of the package: one was met by denser lines, not by simpler code.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.picture import package

PACKAGE = package()
FILES = sorted(PACKAGE.rglob("*.py"))
CORE = [path for path in FILES if "testing" not in path.relative_to(PACKAGE).parts]
MAX_LINES = 350
MAX_LINES_OF_FUNCTION = 50
EXPLAINED = [
    "_group",
    "_run",
    "_copies",
]  # the rooms in which threads, gradients and copies meet
COMMENTS_IN_100_LINES = 5

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    yield from (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function)
    )


def lines_of_docstrings(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (Function, ast.ClassDef, ast.Module))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def code_lines(path: Path, first: int = 1, last: int | None = None) -> int:
    """How many lines hold code: those that are neither empty nor a comment nor part of a docstring or an import."""
    return sum(
        first <= n and (last is None or n <= last) for n in numbers_of_code_lines(path)
    )


@functools.cache
def numbers_of_code_lines(path: Path) -> list[int]:
    text = path.read_text()
    tree = ast.parse(text)
    told = lines_of_docstrings(tree)
    for node in tree.body:  # the path of a room is no idea of the file
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            told.update(range(node.lineno, (node.end_lineno or 0) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return [
        n
        for n, line in numbered
        if line.strip() and not line.strip().startswith("#") and n not in told
    ]


def comment_lines(path: Path) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(
        '"""A docstring.\n\nOf three lines."""\n\n# A comment.\nx = 1  # and another\n\n\ndef f():\n    return x\n'
    )
    assert (code_lines(path), code_lines(path, 9, 10), comment_lines(path)) == (3, 2, 2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_holds_one_idea(path: Path) -> None:
    assert (count := code_lines(path)) <= MAX_LINES, (
        f"{path.name} has {count} lines of code: which two ideas is it?"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = {
        node.name: count
        for node in functions(path)
        if (count := code_lines(path, node.lineno, node.end_lineno))
        > MAX_LINES_OF_FUNCTION
    }
    assert not long


@pytest.mark.parametrize("room", EXPLAINED)
def test_the_rooms_where_most_happens_say_why(room: str) -> None:
    files = [path for path in FILES if path.relative_to(PACKAGE).parts[0] == room]
    assert sum(map(comment_lines, files)) >= COMMENTS_IN_100_LINES / 100 * sum(
        map(code_lines, files)
    )


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_looks_at_the_frames_of_callers(path: Path) -> None:
    assert "_getframe" not in path.read_text()
