"""What Python has once for a process: built-in names, standard streams, hooks, warnings, loggers, Hydra, the folder."""

from __future__ import annotations

import builtins
import gc
import logging
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch

# Attributes of modules. Where this version of Python lacks one, nothing is kept.
_NAMES: list[tuple[Any, str]] = [
    *[(sys, name) for name in ("argv", "stdin", "stdout", "stderr", "excepthook", "displayhook", "unraisablehook")],
    (threading, "excepthook"),
    # Besides the public ones, the name that `catch_warnings(record=True)` replaces.
    *[(warnings, name) for name in ("filters", "showwarning", "formatwarning", "_showwarnmsg_impl", "defaultaction")],
    # Besides the public ones, where `captureWarnings` keeps what it replaces.
    *[(logging, name) for name in ("lastResort", "raiseExceptions", "_warnings_showwarning")],
]
_NAMES = [(owner, name) for owner, name in _NAMES if hasattr(owner, name)]
_LISTS = ("argv", "filters")  # programs write into them


def _running_hydra() -> Any:
    """The run of Hydra that `hydra.main` has begun, of which it lets a process have one; None if there is none."""
    # The class is not there yet while the module is imported.
    kind = getattr(sys.modules.get("hydra.core.global_hydra"), "GlobalHydra", None)
    return None if kind is None else kind.instance().hydra


def _set_running_hydra(run: Any) -> None:
    sys.modules["hydra.core.global_hydra"].GlobalHydra.instance().hydra = run


# What is asked and set by functions.
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
_SETTINGS: list[_Setting] = [
    (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_running_hydra, _set_running_hydra),
]


class _Logger(NamedTuple):
    """What programs set on a logger."""

    level: int
    propagate: bool
    disabled: bool
    handlers: tuple[logging.Handler, ...]
    filters: tuple[Any, ...]


_NEW = _Logger(logging.NOTSET, True, False, (), ())


def put_back_builtins(names: dict[str, Any]) -> None:
    """Makes the built-in names those that `take_builtins` returned."""
    now = vars(builtins)
    if len(now) == len(names) and all(map(operator.is_, now.values(), names.values())):
        return
    for name in now.keys() - names.keys():
        del now[name]
    now.update(names)


def take_builtins() -> dict[str, Any]:
    """The built-in names, each with what it is now."""
    return dict(vars(builtins))


@final
class PythonState:
    """What Python has for a process now. It is taken when this is made.

    Args:
        is_new: Whether it is for another process, that is to have lists of its own.
    """

    def __init__(self, is_new: bool = False) -> None:
        self._builtins = take_builtins()
        self._values = [getattr(owner, name) for owner, name in _NAMES]
        if is_new:
            self._values = [
                list(value) if name in _LISTS else value for (_, name), value in zip(_NAMES, self._values, strict=True)
            ]
        self._loggers = {logger: _state_of(logger) for logger in _loggers()}
        self._disabled = logging.root.manager.disable
        self._settings = [ask() for ask, _ in _SETTINGS]
        self._folder = _folder()

    def put_on(self) -> None:
        """Makes it that of this process.

        Raises:
            FileNotFoundError: If the working folder is no longer there.
        """
        put_back_builtins(self._builtins)
        for (owner, name), value in zip(_NAMES, self._values, strict=True):
            setattr(owner, name, value)
        for logger in _loggers():
            _put_on(logger, self._loggers.get(logger, _NEW))  # a logger that another rank has made is new here
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        for (ask, put), setting in zip(_SETTINGS, self._settings, strict=True):
            if ask() != setting:
                put(setting)
        if self._folder is not None and _folder() != self._folder:
            os.chdir(self._folder)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has deleted it
        return None


def _loggers() -> list[logging.Logger]:
    others = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in others if isinstance(logger, logging.Logger))]


def _state_of(logger: logging.Logger) -> _Logger:
    return _Logger(logger.level, logger.propagate, logger.disabled, tuple(logger.handlers), tuple(logger.filters))


def _put_on(logger: logging.Logger, state: _Logger) -> None:
    if _state_of(logger) == state:
        return
    if logger.level != state.level:
        logger.setLevel(state.level)
    logger.propagate, logger.disabled = state.propagate, state.disabled
    logger.handlers[:], logger.filters[:] = state.handlers, state.filters
