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
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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
    # "noticed", "unnoticed", "not planted", or how the process ended in the last test
    how: str

    def without(self, tests: set[str]) -> Outcome:
        """The outcome if these tests had not run: they fail without a mistake, too."""
        noticed_by = [name for name in self.noticed_by if name not in tests]
        if self.noticed_by and not noticed_by:
            return Outcome([], self.tests_run, "unnoticed")
        return self._replace(noticed_by=noticed_by)


class Trials:
    """Runs trials in place of tests.

    Args:
        trials: The number of each trial, and the trial.
        report: Is called with the number and the outcome of each.
        enough: After so many tests that noticed, a trial ends.
        folder: For files of this process alone.
    """

    def __init__(
        self,
        trials: Iterable[tuple[int, Trial]],
        report: Callable[[int, Outcome], None],
        enough: int,
        folder: Path,
    ) -> None:
        self.trials, self.report, self.enough = trials, report, enough
        self.progress = folder / f"progress-{os.getpid()}.json"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for number, trial in self.trials:
            chosen = [items[name] for name in trial.tests if name in items]
            self.report(number, self._try_in_fork(trial, chosen))
        return True

    def _try_in_fork(self, trial: Trial, items: list[pytest.Item]) -> Outcome:
        self.progress.unlink(missing_ok=True)
        with _mistake_in_file(trial.mistake) as source:
            sys.stdout.flush()
            sys.stderr.flush()
            child = os.fork()
            if child == 0:
                self._try_here(trial.mistake, source, items)
            ended = _await_exit(child, trial.seconds * 3 + HANGS_S)
        noticed, run = [], 0
        if self.progress.exists():
            noticed, run = json.loads(self.progress.read_text())
        if ended == f"exit {NOT_PLANTED}":
            return Outcome([], 0, "not planted")
        if ended != "exit 0":
            # It ended in the test after those that are written down.
            ended_in = [item.nodeid for item in items[run : run + 1]]
            return Outcome([*noticed, *ended_in], run, ended)
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
                self.progress.write_text(json.dumps([noticed, index + 1]))
                if mistake is not None and len(noticed) >= self.enough:
                    break
        except BaseException:
            os._exit(3)  # the mistake has ended pytest itself
        os._exit(0)


def _fails(item: pytest.Item, following: pytest.Item | None) -> bool:
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, nextitem=following, log=False)
    return any(report.failed for report in reports)


def _await_exit(child: int, limit_s: float) -> str:
    """How a process ended. One that takes longer is killed with all that it started."""
    end = time.monotonic() + limit_s
    status = None
    try:
        while status is None and time.monotonic() < end:
            done, ended = os.waitpid(child, os.WNOHANG)
            if done:
                status = ended
            else:
                time.sleep(0.02)
    finally:  # also after Ctrl-C, which the process does not hear
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and processes that its tests share
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
    source = path.read_text()
    wrong = make_mistake(source, mistake)
    try:
        _write_source(path, wrong)
        yield wrong
    finally:
        _write_source(path, source)


def _write_source(path: Path, source: str) -> None:
    """Writes a file, without what Python has compiled of it.

    Python knows a compiled file by the size of the source and the second of its change,
    which two mistakes may share.
    """
    path.write_text(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


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
        alike = wrong.get((code.co_name, code.co_firstlineno), [])
        # Of several lambdas of one line, nobody knows which one is which.
        if len(alike) == 1 and alike[0] != code:
            function.__code__ = alike[0]


def _codes_in(
    code: types.CodeType,
) -> dict[tuple[str, int], list[types.CodeType]]:
    """The code of all functions in a piece of code, by their names and first lines."""
    found: dict[tuple[str, int], list[types.CodeType]] = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            key = constant.co_name, constant.co_firstlineno
            found.setdefault(key, []).append(constant)
            for inner, codes in _codes_in(constant).items():
                found.setdefault(inner, []).extend(codes)
    return found
