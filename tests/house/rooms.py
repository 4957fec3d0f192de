"""Where the package and its files are: the helpers of the tests about the code."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def package() -> Path:
    """The folder of the sources: beside the tests, or where they are installed."""
    here = ROOT / "torchstrategy"
    if here.is_dir():
        return here
    spec = importlib.util.find_spec("torchstrategy")
    assert spec is not None and spec.origin is not None, (
        "torchstrategy is not installed"
    )
    return Path(spec.origin).parent


def rooms() -> set[str]:
    """The folders and files at the top of the package, without `__init__` and such."""
    found = {path.relative_to(package()).parts[0] for path in files()}
    return {name.removesuffix(".py") for name in found if not name.startswith("__")}


@functools.cache
def files() -> list[Path]:
    """All Python files of the package."""
    return sorted(package().rglob("*.py"))


def core_files() -> list[Path]:
    """The files of all rooms but `testing`."""
    return [path for path in files() if short_name(path).split("/")[0] != "testing"]


def short_name(path: Path) -> str:
    """`_data/dataset.py` for the path of that file."""
    return path.relative_to(package()).as_posix()


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of a file's syntax tree, first the module. It is parsed once."""
    return nodes_in(path.read_text(encoding="utf-8"))


def nodes_in(program: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(program)))


def listed(lines: list[str]) -> str:
    """The offenders of a rule, one in each line, below the message of an assertion."""
    return "".join(f"\n  {line}" for line in lines)
