"""Files that one rank writes and another reads.

Nothing says which of the two comes first.
"""

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

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.places import Place
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._ranks.happened import Happened, Moment

_MOST_FILES = 10_000
_FCNTL: Any = (
    importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
)  # None on Windows
_STANDARD = sysconfig.get_paths()["stdlib"]
# Through these a program opens files of its own; others have files that no other rank's
# program reads, such as caches.
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
    "torchstrategy.testing._lints",  # other lints watch `torch.load`, too
)


class _Use(NamedTuple):
    moment: Moment
    place: Place


@final
class Files(Lint):
    """Notes who has written and read which files.

    Asks whether the later one knew of the earlier one.
    """

    def __init__(self) -> None:
        self._written: dict[str, dict[int, _Use]] = defaultdict(dict)
        self._read: dict[str, dict[int, _Use]] = defaultdict(dict)
        self._found: dict[tuple[Place, Place], str] = {}
        self._has_locks = False

    @override
    def uses_file(self, facts: Facts, happened: Happened, what: str, file: Any) -> None:
        # Who has it first, and what that rank does then, is not seen.
        if what == "locks":
            self._has_locks = True
        elif what == "looks":
            self._looks(happened, facts.rank, file)
        else:
            self._opens(happened, facts.rank, file, what == "writes")

    def _opens(self, happened: Happened, rank: int, file: Any, is_write: bool) -> None:
        path, place = _path_of(file), None if self._has_locks else _place()
        if path is None or place is None:
            return
        mine, theirs = (
            (self._written, self._read) if is_write else (self._read, self._written)
        )
        if path not in mine and len(mine) >= _MOST_FILES:
            return
        use = mine[path][rank] = _Use(happened.now(rank), place)
        for other, their in theirs.get(path, {}).items():
            reader = other if is_write else rank
            if (
                other == rank
                or reader in self._written.get(path, ())
                or happened.knows(rank, their.moment)
            ):
                continue
            read, written, writer = (
                (their, use, rank) if is_write else (use, their, other)
            )
            self._found.setdefault(
                (written.place, read.place),
                f"Rank {reader} reads {Path(path).name} ({read.place}), and rank "
                f"{writer} writes it ({written.place}), and no collective of both is "
                "in between: it may find an older file, a part of one, or none.",
            )

    def _looks(self, happened: Happened, rank: int, file: Any) -> None:
        """A rank asks whether a file is there, or, with None, which ones there are.

        It may wait for what another one writes.
        """
        path = None if file is None else _path_of(file)
        for known in self._written if file is None else [path]:
            for use in (
                self._written.get(known, {}).values() if known is not None else ()
            ):
                happened.sees(rank, use.moment)

    @override
    def findings(self) -> list[Finding | None]:
        if self._has_locks:
            return []
        return [
            finding(
                "file-not-awaited",
                says,
                "Call `dist.barrier()` on all ranks between the two.",
                list(places),
            )
            for places, says in self._found.items()
        ]


Tell = Callable[[str, Any], None]
"""Is told what a program does with a file.

It `"reads"`, `"writes"`, `"looks"` or `"locks"`.
"""
Does = tuple[str, Any] | None
"""What a call does, and with which file, None for any.

It is None if the call does nothing with a file by name.
"""


def replaced(tell: Tell) -> list[tuple[Any, str, Any]]:
    """What tells of files, in place of functions of Python and torch."""
    serialization: Any = torch.serialization
    opening, saving = (
        _telling(builtins.open, _opens, tell),
        _telling(serialization.save, _saves, tell),
    )
    values: list[tuple[Any, str, Any]] = [
        (builtins, "open", opening),
        (io, "open", opening),
        (torch, "save", saving),
    ]
    calls: list[tuple[Callable[..., Does], Any, list[str]]] = [
        (_moves, os, ["replace", "rename"]),
        (_looks, os.path, ["exists", "isfile", "getmtime", "getsize"]),
        (_looks, Path, ["exists", "is_file", "stat"]),
        (_lists, os, ["listdir"]),
        (_lists, glob, ["glob", "iglob"]),
        (_lists, Path, ["glob", "rglob", "iterdir"]),
    ]
    if _FCNTL is not None:
        calls.append((_locks, _FCNTL, ["flock", "lockf"]))
    for does, owner, names in calls:
        values += [
            (owner, name, _telling(getattr(owner, name), does, tell)) for name in names
        ]
    return values


def _telling(
    method: Callable[..., Any], does: Callable[..., Does], tell: Tell
) -> Callable[..., Any]:
    """The method, which tells before it is called what it does."""

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            done = does(*args, **kwargs)
        except TypeError:  # the arguments do not fit, and the method will say so
            done = None
        if done is not None:
            tell(*done)
        return method(*args, **kwargs)

    return told


# What each of these calls does, by its arguments.


def _opens(file: Any, mode: Any = "r", *_: Any, **__: Any) -> Does:
    if not isinstance(mode, str) or isinstance(file, int):
        return None
    return "locks" if "x" in mode else "reads" if set(mode) <= set(
        "rbtU"
    ) else "writes", file


def _saves(obj: Any, f: Any, *_: Any, **__: Any) -> Does:
    return "writes", f


def _moves(src: Any, dst: Any, **_: Any) -> Does:
    return "writes", dst


def _looks(path: Any = None, *_: Any, filename: Any = None, **__: Any) -> Does:
    return "looks", filename if path is None else path


def _lists(*_: Any, **__: Any) -> Does:
    return "looks", None


def _locks(*_: Any, **__: Any) -> Does:
    return "locks", None


def _path_of(file: Any) -> str | None:
    """The whole path of a file; None of what has no path.

    A buffer has none, and the number of an open file.
    """
    if not isinstance(file, (str, bytes, os.PathLike)):
        return None
    try:
        path = os.path.abspath(os.fsdecode(file))
    except OSError:  # the working directory is gone
        return None
    return None if path.startswith(("/dev/", "/proc/")) else path


def _place() -> Place | None:
    """Where the program opens a file; None if an import or a library does."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        is_between = name.partition(".")[0] in _BETWEEN or name.startswith(_TORCHS)
        if not is_between:
            is_library = (
                "site-packages" in file
                or "dist-packages" in file
                or file.startswith((_STANDARD, "<frozen"))
            )
            is_library = is_library or name.partition(".")[0] in (
                "torch",
                "torchstrategy",
            )
            return None if is_library else Place(file, frame.f_lineno)
        frame = frame.f_back
    return None
