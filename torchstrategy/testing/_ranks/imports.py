"""What modules say of loggers, warnings and files while they are imported: it happens once, and holds for all ranks."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, final

import torch

from torchstrategy.testing._simulation.replacing import replacing

_IMPORTING = "<frozen importlib._bootstrap>"  # the file of the frames in which a module is imported


@final
class Imports:
    """The calls of modules that were imported in a run. A rank that comes later repeats them on what it has itself."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def repeat(self, start: int) -> None:
        """Repeats all calls from one on."""
        for call in self._calls[start:]:
            call()

    def noted(self) -> AbstractContextManager[None]:
        """A block in which such calls are noted."""
        places: list[tuple[Any, str]] = [
            (logging.Logger, "addHandler"),
            (logging.Logger, "setLevel"),
            (logging.Handler, "setLevel"),
            (logging.Handler, "setFormatter"),
            *[(logging, name) for name in ("setLoggerClass", "setLogRecordFactory", "addLevelName")],
            (torch.serialization, "add_safe_globals"),
            (torch.serialization, "register_package"),
            (warnings, "_add_filter"),  # through which all functions of `warnings` add a filter
        ]
        there = [(owner, name) for owner, name in places if hasattr(owner, name)]
        return replacing([(owner, name, self._noting(getattr(owner, name))) for owner, name in there])

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if _is_importing():
                self._calls.append(functools.partial(function, *args, **kwargs))
            return result

        return noting


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
