"""Plants one mistake after another, and runs the tests that could notice.

`Trials` is a plugin of pytest that takes the place of its loop over the tests. The
tests are collected once, which takes a while. Then each mistake gets a process that is
forked from this one, so that no mistake is there for the next.

In the forked process the mistake is made twice: in the functions that are there, whose
code is exchanged, and in the file, for processes that the tests start.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .kinds import Mistake, make_mistake
from .reached import PACKAGE

NOT_PLANTED = 4  # what a forked process exits with that could not make the mistake
HANGS_S = 120.0  # beside the time that the tests of a trial take without a mistake


class Trial(NamedTuple):
    """A mistake, and the tests that could notice it, in the order in which they run."""

    mistake: Mistake | None  # None: nothing is planted, and nothing may be noticed
    tests: list[str]
    seconds: float  # that the tests take without a mistake


class Outcome(NamedTuple):
    """Which tests noticed a mistake."""

    noticed_by: list[str]
    tests_run: int
    how: str  # "noticed", "unnoticed", or how the process ended


class Trials:
    """Runs trials in place of tests.

    Args:
        trials: The number of each trial, and the trial.
        tell: Is called with the number and the outcome of each.
        enough: After so many tests that noticed, a trial ends.
        folder: For files of this process alone.
    """

    def __init__(
        self,
        trials: Iterable[tuple[int, Trial]],
        tell: Callable[[int, Outcome], None],
        enough: int,
        folder: Path,
    ) -> None:
        self.trials, self.tell, self.enough = trials, tell, enough
        self.told = folder / f"outcome-{os.getpid()}.json"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for number, trial in self.trials:
            chosen = [items[name] for name in trial.tests if name in items]
            self.tell(number, self._try_in_fork(trial, chosen))
        return True

    def _try_in_fork(self, trial: Trial, items: list[pytest.Item]) -> Outcome:
        self.told.unlink(missing_ok=True)
        with _mistake_in_file(trial.mistake) as source:
            sys.stdout.flush()
            sys.stderr.flush()
            child = os.fork()
            if child == 0:
                self._try_here(trial.mistake, source, items)
            ended = _wait_for(child, trial.seconds * 3 + HANGS_S)
        noticed, run = [], 0
        if self.told.exists():
            noticed, run = json.loads(self.told.read_text())
        if ended == f"exit {NOT_PLANTED}":
            raise RuntimeError(f"this could not be planted: {trial.mistake}")
        if ended != "exit 0":
            return Outcome([*noticed, ended], run, ended)
        return Outcome(noticed, run, "noticed" if noticed else "unnoticed")

    def _try_here(
        self, mistake: Mistake | None, source: str, items: list[pytest.Item]
    ) -> None:
        """Runs the tests with the mistake, writes down which noticed, and exits."""
        os.setsid()  # whatever is started here can be ended with this process
        try:
            if mistake is not None:
                _exchange_code(PACKAGE / mistake.path, source)
        except BaseException:
            traceback.print_exc()
            os._exit(NOT_PLANTED)
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            noticed: list[str] = []
            for index, item in enumerate(items):
                following = items[index + 1] if index + 1 < len(items) else None
                if _fails(item, following):
                    noticed.append(item.nodeid)
                self.told.write_text(json.dumps([noticed, index + 1]))
                if len(noticed) >= self.enough:
                    break
        except BaseException:
            os._exit(3)  # the mistake has ended pytest itself
        os._exit(0)


def _fails(item: pytest.Item, following: pytest.Item | None) -> bool:
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, nextitem=following, log=False)
    return any(report.failed for report in reports)


def _wait_for(child: int, limit_s: float) -> str:
    """How a process ended. One that takes longer is killed with all that it started."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that tests share, too
    if status is None:
        os.waitpid(child, 0)
        return "hang"
    code = os.waitstatus_to_exitcode(status)
    return f"exit {code}" if code >= 0 else f"signal {-code}"


@contextlib.contextmanager
def _mistake_in_file(mistake: Mistake | None) -> Iterator[str]:
    """Makes the mistake in the file, and takes it back in the end."""
    if mistake is None:
        yield ""
        return
    path = PACKAGE / mistake.path
    source, before = path.read_text(), path.stat()
    wrong = make_mistake(source, mistake)
    path.write_text(wrong)
    # Python finds compiled files by the seconds of this time.
    os.utime(path, (before.st_atime, before.st_mtime + 1000 + os.getpid() % 1000))
    try:
        yield wrong
    finally:
        path.write_text(source)
        os.utime(path, (before.st_atime, before.st_mtime))


def _exchange_code(path: Path, source: str) -> None:
    """Gives the functions of a file the code that they have in another source of it."""
    wrong = _codes_in(compile(source, str(path), "exec"))
    gc.unfreeze()  # the tests freeze what is there, and the collector would not name it
    for function in gc.get_objects():
        if type(function) is not types.FunctionType:  # proxies may claim any class
            continue
        code = function.__code__
        if code.co_filename != str(path):
            continue
        other = wrong.get((code.co_name, code.co_firstlineno))
        if other is not None and other != code:
            with contextlib.suppress(ValueError):  # a closure of fewer names
                function.__code__ = other


def _codes_in(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    found: dict[tuple[str, int], Any] = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found[constant.co_name, constant.co_firstlineno] = constant
            found.update(_codes_in(constant))
    return found
