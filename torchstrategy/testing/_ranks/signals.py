"""Handlers of signals: each rank has its own.

They answer the signals that the rank sends to itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from torchstrategy.testing._ranks.world import current_rank, current_world
from torchstrategy.testing._simulation.replacing import replacing

_TIMERS = ("alarm", "setitimer", "pause", "sigwait")  # of a whole process


@final
class OwnSignals:
    """The handlers of all ranks."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[int, int], Any] = {}  # by rank and signal

    def kept(self) -> AbstractContextManager[None]:
        """A block in which ranks have handlers of their own."""
        places: list[tuple[Any, str]] = [
            *[(signal, name) for name in ("signal", "getsignal", "raise_signal")],
            (os, "kill"),
            *[(signal, name) for name in _TIMERS if hasattr(signal, name)],
        ]
        values: list[tuple[Any, str, Any]] = []
        for owner, name in places:
            own = getattr(self, f"_{name}", None)
            values.append((owner, name, self._in_ranks(getattr(owner, name), own)))
        return replacing(values)

    def _in_ranks(
        self, function: Callable[..., Any], own: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """A function for all threads, which calls `own` in ranks, or refuses the call.

        `own` gets the original function before its arguments.
        """

        def called(*args: Any, **kwargs: Any) -> Any:
            if current_world() is None:
                return function(*args, **kwargs)
            if own is not None:
                return own(function, *args, **kwargs)
            raise RuntimeError(
                f"rank {current_rank()} called signal.{function.__name__}(), which a "
                "process has once, and the ranks of run_ranks are threads of one "
                "process. Leave it away in tests, or run this program with torchrun."
            )

        return called

    def _signal(
        self, original: Callable[..., Any], signalnum: int, handler: Any
    ) -> Any:
        if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
            raise TypeError(
                "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable "
                "object"
            )
        before = signal.getsignal(signalnum)
        self._handlers[current_rank(), int(signalnum)] = handler
        return before

    def _getsignal(self, original: Callable[..., Any], signalnum: int) -> Any:
        return self._handlers.get((current_rank(), int(signalnum)), original(signalnum))

    def _raise_signal(self, original: Callable[..., Any], signalnum: int) -> None:
        handler = self._handlers.get((current_rank(), int(signalnum)), signal.SIG_DFL)
        if handler is signal.SIG_DFL:
            original(signalnum)
        elif callable(handler) and handler is not signal.SIG_IGN:
            handler(signalnum, sys._getframe(2))

    def _kill(self, original: Callable[..., Any], pid: int, signalnum: int) -> None:
        if pid == os.getpid():
            self._raise_signal(lambda number: original(pid, number), signalnum)
        else:
            original(pid, signalnum)
