"""Ranks share modules, so what a module sets up on import must hold for all ranks.

A module may set up loggers, warnings and files.
"""

from __future__ import annotations

import functools
import importlib._bootstrap
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, final

import torch

from torchstrategy.testing._ranks.turns import Turns, Wait
from torchstrategy.testing._simulation.replacing import replacing

_ModuleLock: Any = importlib._bootstrap._ModuleLock  # type: ignore[attr-defined]
# The file of the frames in which a module is imported.
_IMPORTING = "<frozen importlib._bootstrap>"


@final
class Imports:
    """The calls of modules that were imported in a run.

    A rank that comes later repeats them on what it has itself.

    Args:
        turns: Of the ranks. One that waits while it imports a module keeps Python's
            lock of this module.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._calls: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def repeat(self, start: int) -> None:
        """Repeats all calls from one on."""
        for call in self._calls[start:]:
            call()

    def noted(self) -> AbstractContextManager[None]:
        """A block in which the set-up calls of imported modules are noted.

        No rank waits for a module that another one is importing.
        """
        places: list[tuple[Any, str]] = [
            (logging.Logger, "addHandler"),
            (logging.Logger, "setLevel"),
            (logging.Handler, "setLevel"),
            (logging.Handler, "setFormatter"),
            *[
                (logging, name)
                for name in ("setLoggerClass", "setLogRecordFactory", "addLevelName")
            ],
            (torch.serialization, "add_safe_globals"),
            (torch.serialization, "register_package"),
            # All functions of `warnings` add a filter through this one.
            (warnings, "_add_filter"),
        ]
        there = [(owner, name) for owner, name in places if hasattr(owner, name)]
        noting = [
            (owner, name, self._noting(getattr(owner, name))) for owner, name in there
        ]
        return replacing(
            [*noting, (_ModuleLock, "acquire", self._acquiring(_ModuleLock.acquire))]
        )

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if _is_importing():
                self._calls.append(functools.partial(function, *args, **kwargs))
            return result

        return noting

    def _acquiring(self, acquire: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(acquire)
        def acquiring(lock: Any) -> Any:
            if lock.owner is not None:
                self._turns.refuse_to_wait_for_thread(lock.owner, _Import(lock.name))
            return acquire(lock)

        return acquiring


@final
class _Import(Wait):
    def __init__(self, module: str) -> None:
        self._module = module

    def is_over(self) -> bool:
        return False

    def describe(self) -> str:
        return (
            f"imports {self._module}, which another rank has begun to import. Ranks "
            "share modules, so call collectives in functions, and not while a module "
            "is imported"
        )


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
