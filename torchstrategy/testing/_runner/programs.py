"""A script or a module, run as Python runs it.

A script may take the argument `--local_rank`, which `torch.distributed.launch` gave
each rank. `torchrun` does not give it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import NamedTuple

_SPELLINGS = ("--local_rank", "--local-rank")


class Program(NamedTuple):
    """A program, compiled.

    Attributes:
        code: The code.
        file: The path of its source.
        package: The package that it is in, for relative imports; None for a script.
        folder: Where it finds what it imports.
        arguments: What it finds in `sys.argv[1:]`.
    """

    code: CodeType
    file: str
    package: str | None
    folder: str
    arguments: Sequence[str]

    def run(self) -> None:
        """Runs it, in a new module `__main__`."""
        module = types.ModuleType("__main__")
        module.__file__, module.__package__ = self.file, self.package
        sys.modules["__main__"] = module
        exec(self.code, vars(module))

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """A block in which `sys.argv`, `sys.path` and `__main__` suit the program.

        `__main__` is the module of this name, as the program expects it.
        """
        before = sys.argv, list(sys.path), sys.modules["__main__"]
        sys.argv = [self.file, *self.arguments]
        sys.path.insert(0, self.folder)
        try:
            yield
        finally:
            sys.argv, sys.path[:], sys.modules["__main__"] = before


def script(path: str, arguments: Sequence[str]) -> Program:
    """The program in a file.

    Raises:
        FileNotFoundError: If there is none.
    """
    source = Path(path).read_bytes()
    code = compile(source, path, "exec")
    return Program(code, path, None, str(Path(path).resolve().parent), arguments)


def module(name: str, arguments: Sequence[str]) -> Program:
    """The program that `python -m name` runs.

    Raises:
        ModuleNotFoundError: If there is no such module.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    finally:
        del sys.path[0]
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r} that could be run")
    code = compile(Path(found.origin).read_bytes(), found.origin, "exec")
    return Program(code, found.origin, found.parent, str(Path.cwd()), arguments)


def wanted_spelling(file: str, arguments: Sequence[str]) -> str | None:
    """How a script spells the argument `--local_rank` that it takes.

    It is None if it takes none, or if the caller gives it.
    """
    if any(argument.partition("=")[0] in _SPELLINGS for argument in arguments):
        return None
    try:
        source = Path(file).read_text(errors="replace")
    except OSError:
        return None
    for spelling in _SPELLINGS:
        if re.search(rf"add_argument\([^)]*['\"]{spelling}['\"]", source):
            return spelling
    return None


def give_local_rank(spelling: str | None, rank: int) -> None:
    """Adds `--local_rank`, in this spelling, to the arguments of this rank."""
    if spelling is not None:
        sys.argv.insert(1, f"{spelling}={rank}")
