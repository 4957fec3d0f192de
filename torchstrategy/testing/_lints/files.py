"""Files that one rank writes and another reads, where nothing says which of the two comes first."""

from __future__ import annotations

import builtins
import functools
import glob
import importlib
import importlib.util
import inspect
import io
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.places import Place
from torchstrategy.testing._ranks.happened import Happened, Moment

_MOST_FILES = 10_000
_FCNTL: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # None on Windows
_STANDARD = sysconfig.get_paths()["stdlib"]
# Through these a program opens files of its own; others have files that no other rank's program reads, such as caches.
_BETWEEN = (
    "pathlib",
    "io",
    "json",
    "pickle",
    "shutil",
    "csv",
    "numpy",
    "pandas",
    "yaml",
    "gzip",
    "codecs",
    "contextlib",
)
_TORCHS = (
    "torch.serialization",
    "torchstrategy.testing._simulation",
    "torchstrategy.testing._runner",
    "torchstrategy.testing._lints.watching",
    "torchstrategy.testing._lints.session",
    __name__,
)


class _Use(NamedTuple):
    moment: Moment
    place: Place


@final
class Files(Lint):
    """Notes who has written and read which files, and asks whether the later one knew of the earlier one."""

    def __init__(self) -> None:
        self._written: dict[str, dict[int, _Use]] = defaultdict(dict)
        self._read: dict[str, dict[int, _Use]] = defaultdict(dict)
        self._found: dict[tuple[Place, Place], str] = {}
        self._has_locks = False

    def uses(self, happened: Happened, rank: int, file: Any, is_write: bool) -> None:
        """A rank opens a file."""
        path, place = _path_of(file), None if self._has_locks else _place()
        if path is None or place is None:
            return
        mine, theirs = (self._written, self._read) if is_write else (self._read, self._written)
        if path not in mine and len(mine) >= _MOST_FILES:
            return
        use = mine[path][rank] = _Use(happened.now(rank), place)
        for other, their in theirs.get(path, {}).items():
            reader = other if is_write else rank
            if other == rank or reader in self._written.get(path, ()) or happened.knows(rank, their.moment):
                continue
            read, written, writer = (their, use, rank) if is_write else (use, their, other)
            self._found.setdefault(
                (written.place, read.place),
                f"Rank {reader} reads {Path(path).name} ({read.place}), and rank {writer} writes it ({written.place}), "
                "and no collective of both is in between: it may find an older file, a part of one, or none.",
            )

    def looks(self, happened: Happened, rank: int, file: Any = None) -> None:
        """A rank asks whether a file is there, or, with None, which ones: it may wait for what another one writes."""
        path = None if file is None else _path_of(file)
        for known in self._written if file is None else [path]:
            for use in self._written.get(known, {}).values() if known is not None else ():
                happened.sees(rank, use.moment)

    def locks(self) -> None:
        """A rank takes a lock: who has it first, and what it does then, is not seen."""
        self._has_locks = True

    @override
    def findings(self) -> list[Finding | None]:
        if self._has_locks:
            return []
        return [
            finding("file-not-awaited", says, "Call `dist.barrier()` on all ranks between the two.", list(places))
            for places, says in self._found.items()
        ]


Tell = Callable[[str, Any], None]
"""Is told what a program does with a file: `"reads"`, `"writes"`, `"looks"` or `"locks"`."""


def replaced(tell: Tell) -> list[tuple[Any, str, Any]]:
    """What tells of files, in place of functions of Python and torch."""
    serialization: Any = torch.serialization
    opening, saving = _opening(builtins.open, tell), _saving(serialization.save, tell)
    values: list[tuple[Any, str, Any]] = [
        (builtins, "open", opening),
        (io, "open", opening),
        (torch, "save", saving),
        (serialization, "save", saving),
        (os, "replace", _moving(os.replace, tell)),
        (os, "rename", _moving(os.rename, tell)),
    ]
    looking: list[tuple[Any, str]] = [
        *[(os.path, name) for name in ("exists", "isfile", "getmtime", "getsize")],
        *[(Path, name) for name in ("exists", "is_file", "stat")],
    ]
    listing: list[tuple[Any, str]] = [
        (os, "listdir"),
        *[(glob, name) for name in ("glob", "iglob")],
        *[(Path, name) for name in ("glob", "rglob", "iterdir")],
    ]
    values += [(owner, name, _looking(getattr(owner, name), tell)) for owner, name in looking]
    values += [(owner, name, _before(getattr(owner, name), "looks", tell)) for owner, name in listing]
    if _FCNTL is None:
        return values
    return [*values, *[(_FCNTL, name, _before(getattr(_FCNTL, name), "locks", tell)) for name in ("flock", "lockf")]]


def _opening(method: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and not isinstance(file, int):
            tell("locks" if "x" in mode else "reads" if set(mode) <= set("rbtU") else "writes", file)
        return method(file, mode, *args, **kwargs)

    return told


def _saving(method: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        tell("writes", f)
        return method(obj, f, *args, **kwargs)

    return told


def _moving(method: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(src: Any, dst: Any, **kwargs: Any) -> Any:
        tell("writes", dst)
        return method(src, dst, **kwargs)

    return told


def _looking(method: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(path: Any, *args: Any, **kwargs: Any) -> Any:
        tell("looks", path)
        return method(path, *args, **kwargs)

    return told


def _before(method: Callable[..., Any], what: str, tell: Tell) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        tell(what, None)
        return method(*args, **kwargs)

    return told


def _path_of(file: Any) -> str | None:
    """The whole path of a file; None of what is none, such as a buffer or the number of an open file."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return None
    path = os.path.abspath(os.fsdecode(file))
    return None if path.startswith(("/dev/", "/proc/")) else path


def _place() -> Place | None:
    """Where the program opens a file; None if an import does, or a library for itself."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        is_between = name.partition(".")[0] in _BETWEEN or name.startswith(_TORCHS)
        if not is_between:
            is_library = "site-packages" in file or "dist-packages" in file or file.startswith((_STANDARD, "<frozen"))
            is_library = is_library or name.partition(".")[0] in ("torch", "torchstrategy")
            return None if is_library else Place(file, frame.f_lineno)
        frame = frame.f_back
    return None
