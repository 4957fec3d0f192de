"""Where the report goes, whatever the program has replaced.

It also knows what would end Python before there is a report.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, final

from torchstrategy.testing._ranks.world import current_world


@final
class Output:
    """The standard error of this process as it is now.

    A program may replace `print` and `sys.stderr`, or close it.
    """

    def __init__(self) -> None:
        self._stream: Any = sys.stderr
        self._file: int | None = None
        with suppress(AttributeError, OSError, ValueError):  # it is no file
            self._file = os.dup(sys.stderr.fileno())

    def write(self, text: str) -> bool:
        """Writes some lines; returns whether that was possible."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the program's own, which may be closed
                stream.flush()
        try:
            if self._file is None:
                self._stream.write(text)
                self._stream.flush()
                return True
            left = text.encode("utf-8", "backslashreplace")
            while left:
                left = left[os.write(self._file, left) :]
        except (AttributeError, OSError, ValueError):
            return False
        return True


@contextmanager
def ends_with_a_report(output: Output) -> Iterator[None]:
    """A block in which `os._exit` ends the program, not Python.

    In the block, `os.exec...` is refused.
    """
    mine, exit_now, replace = os.getpid(), os._exit, (os.execv, os.execve)

    def leave(status: int) -> NoReturn:
        if os.getpid() == mine:
            if (
                threading.current_thread() is threading.main_thread()
                or current_world() is not None
            ):
                raise SystemExit(status)
            output.write(
                f"os._exit({status}) was called on thread "
                f"{threading.current_thread().name!r}: no report.\n"
            )
            exit_now(status or 1)
        exit_now(status)

    def refused(execute: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *args: Any) -> Any:
            if os.getpid() != mine:
                return execute(path, *args)
            raise RuntimeError(
                f"The program puts {path!r} in the place of this process "
                f"(os.{execute.__name__}), and there would be no report, and no "
                "simulated devices. Start what it starts with "
                "torchstrategy.testing.run."
            )

        return refuse

    system: Any = os
    system._exit, system.execv, system.execve = (
        leave,
        refused(os.execv),
        refused(os.execve),
    )
    try:
        yield
    finally:
        system._exit, (system.execv, system.execve) = exit_now, replace
