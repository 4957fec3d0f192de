"""What Python has once for a process.

This is built-in names, streams, hooks, warnings, loggers, settings, Hydra and the
folder.
"""

from __future__ import annotations

import asyncio
import builtins
import csv
import gc
import locale
import logging
import multiprocessing
import operator
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torchstrategy.testing._ranks.part import Part, part_of_names

# Attributes of modules. Where this version of Python lacks one, nothing is kept.
_NAMES: list[tuple[Any, str]] = [
    *[(sys, name) for name in ("argv", "stdin", "stdout", "stderr")],
    *[
        (sys, name)
        for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
    ],
    (threading, "excepthook"),
    # Besides the public ones, the name that `catch_warnings(record=True)` replaces.
    *[
        (warnings, name)
        for name in (
            "filters",
            "showwarning",
            "formatwarning",
            "_showwarnmsg_impl",
            "defaultaction",
        )
    ],
    # Besides the public ones, where `captureWarnings` keeps what it replaces.
    *[
        (logging, name)
        for name in ("lastResort", "raiseExceptions", "_warnings_showwarning")
    ],
    # What `setLoggerClass`, `setLogRecordFactory` and `addLevelName` set.
    *[
        (logging, name)
        for name in (
            "_loggerClass",
            "_logRecordFactory",
            "_levelToName",
            "_nameToLevel",
        )
    ],
    *[(logging.root.manager, name) for name in ("loggerClass", "logRecordFactory")],
    (tempfile, "tempdir"),
    # What `set_start_method` sets.
    (multiprocessing.context._default_context, "_actual_context"),
    (asyncio.events, "_event_loop_policy"),
]
_NAMES = [(owner, name) for owner, name in _NAMES if hasattr(owner, name)]


def take_builtins() -> dict[str, Any]:
    """The built-in names, each with what it is now."""
    return dict(vars(builtins))


def put_back_builtins(names: dict[str, Any]) -> None:
    """Makes the built-in names those that `take_builtins` returned."""
    now = vars(builtins)
    for name in now.keys() - names.keys():
        del now[name]
    now.update(names)


def _have_the_same_objects(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(
        others[name] is value for name, value in some.items()
    )


# What programs set on a logger: level, `propagate`, `disabled`, handlers, filters. A
# process has hundreds of loggers.
_Logger = tuple[int, bool, bool, tuple[logging.Handler, ...], tuple[Any, ...]]
_NEW: _Logger = (logging.NOTSET, True, False, (), ())


def _take_loggers() -> dict[logging.Logger, _Logger]:
    others = [
        one
        for one in logging.root.manager.loggerDict.values()
        if isinstance(one, logging.Logger)
    ]
    return {
        one: (
            one.level,
            one.propagate,
            one.disabled,
            tuple(one.handlers),
            tuple(one.filters),
        )
        for one in (logging.root, *others)
    }


def _put_loggers(loggers: dict[logging.Logger, _Logger]) -> None:
    for logger, now in _take_loggers().items():
        # A logger that another rank has made is new here.
        wanted = loggers.get(logger, _NEW)
        if now == wanted:
            continue
        level, logger.propagate, logger.disabled, handlers, filters = wanted
        if logger.level != level:
            logger.setLevel(level)
        logger.handlers[:], logger.filters[:] = handlers, filters


_logging: Any = logging
# What programs set on a handler: level, form, filters. Ranks share those that were
# there before.
_Handler = tuple[int, logging.Formatter | None, tuple[Any, ...]]


def _take_handlers() -> dict[logging.Handler, _Handler]:
    handlers = [reference() for reference in _logging._handlerList]
    return {
        one: (one.level, one.formatter, tuple(one.filters))
        for one in handlers
        if one is not None
    }


def _put_handlers(handlers: dict[logging.Handler, _Handler]) -> None:
    for handler, (level, form, filters) in handlers.items():
        handler.level, handler.formatter, handler.filters[:] = level, form, filters


def _take_collector() -> tuple[bool, tuple[int, int, int]]:
    return gc.isenabled(), gc.get_threshold()


def _put_collector(collector: tuple[bool, tuple[int, int, int]]) -> None:
    is_on, thresholds = collector
    gc.set_threshold(*thresholds)
    if is_on:
        gc.enable()
    else:
        gc.disable()


def _put_recursion_limit(limit: int) -> None:
    with suppress(RecursionError):  # it is deeper here than it was there
        sys.setrecursionlimit(limit)


def _take_umask() -> int:
    mask = os.umask(0o077)  # there is no other way to ask
    os.umask(mask)
    return mask


def _take_time_zone() -> tuple[Any, ...]:
    return time.tzname, time.timezone, time.altzone, time.daylight


def _put_time_zone(_: tuple[Any, ...]) -> None:
    if hasattr(time, "tzset"):
        time.tzset()  # it reads `TZ`, which is that of the rank by now


def _put_locale(name: str) -> None:
    with suppress(locale.Error):  # it is no longer there
        locale.setlocale(locale.LC_ALL, name)


def _take_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has deleted it
        return None


def _put_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


class _Environment(NamedTuple):
    """The environment of a process.

    Attributes:
        place: What `os.environ` is. A program may set it to a dict, which does not
            change the true environment.
        content: The true environment, in the form in which Python keeps it, which need
            not be decoded to be compared.
    """

    place: Any
    content: dict[Any, Any]


_environment: Any = os.environ


def _take_environment() -> _Environment:
    return _Environment(os.environ, dict(_environment._data))


def _put_environment(wanted: _Environment) -> None:
    # As a name: this is not meant to change the variables.
    setattr(os, "environ", wanted.place)  # noqa: B010
    now = dict(_environment._data)
    for name in now.keys() - wanted.content.keys():
        del _environment[_environment.decodekey(name)]
    for name, value in wanted.content.items():
        if now.get(name) != value:
            _environment[_environment.decodekey(name)] = _environment.decodevalue(value)


def _is_same_environment(one: _Environment, other: _Environment) -> bool:
    return one.place is other.place and one.content == other.content


def _begin_environment(environment: _Environment) -> _Environment:
    """What a process has that this one begins.

    `os.environ` holds its true environment, and not a dict.
    """
    if environment.place is _environment:
        return environment
    return add_to_environment(_Environment(_environment, {}), environment.place)


def add_to_environment(
    environment: _Environment, variables: Mapping[str, str]
) -> _Environment:
    """What the part of the environment has if variables are added to it."""
    added = {
        _environment.encodekey(name): _environment.encodevalue(value)
        for name, value in variables.items()
    }
    return environment._replace(content=environment.content | added)


def _take_running_hydra() -> Any:
    """The run of Hydra that `hydra.main` has begun; None if there is none.

    Hydra lets a process have only one run.
    """
    # The class is not there yet while the module is imported.
    kind = getattr(sys.modules.get("hydra.core.global_hydra"), "GlobalHydra", None)
    return None if kind is None else kind.instance().hydra


def _put_running_hydra(run: Any) -> None:
    sys.modules["hydra.core.global_hydra"].GlobalHydra.instance().hydra = run


ENVIRONMENT = Part(
    _take_environment, _put_environment, _is_same_environment, _begin_environment
)
PARTS = [
    ENVIRONMENT,
    Part(take_builtins, put_back_builtins, _have_the_same_objects),
    part_of_names(_NAMES),
    Part(_take_loggers, _put_loggers),
    Part(lambda: logging.root.manager.disable, logging.disable),
    Part(_take_handlers, _put_handlers),
    Part(_take_collector, _put_collector),
    Part(sys.getrecursionlimit, _put_recursion_limit),
    Part(_take_umask, os.umask),
    Part(_take_time_zone, _put_time_zone),
    Part(lambda: locale.setlocale(locale.LC_ALL), _put_locale),
    Part(socket.getdefaulttimeout, socket.setdefaulttimeout),
    Part(csv.field_size_limit, csv.field_size_limit),
    Part(_take_running_hydra, _put_running_hydra, operator.is_),
    Part(_take_folder, _put_folder),
]
