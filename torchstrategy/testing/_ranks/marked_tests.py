"""Runs a test in ranks.

It may be a plain test, an `async` one, a hypothesis test or a method of
`unittest.TestCase`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torchstrategy.testing._ranks.run_ranks import run_ranks


def in_ranks(
    test: Callable[..., Any], n: int, order: Any = None
) -> Callable[..., None]:
    """A function that calls a test in `n` ranks.

    Of its arguments, `rank` and `capsys` are each rank's own.
    """
    before = getattr(test, "__wrapped__", None)
    if inspect.iscoroutinefunction(before) and not inspect.iscoroutinefunction(test):
        # Plugins for `async` tests wrap them, to run them in a loop of the caller's
        # thread.
        test = before

    @functools.wraps(test)
    def in_each(*args: Any, **arguments: Any) -> None:
        def main(rank: int) -> None:
            own = arguments | ({"rank": rank} if "rank" in arguments else {})
            if "capsys" not in own:
                _call(test, args, own)
                return
            with _own_output() as output:
                _call(test, args, own | {"capsys": output})

        run_ranks(main, n, order=order)

    return in_each


def _call(test: Callable[..., Any], args: Any, arguments: dict[str, Any]) -> None:
    result = test(*args, **arguments)
    if inspect.iscoroutine(result):
        asyncio.run(result)


def run_test_case(
    found: unittest.TestCase, method: str, n: int, order: Any = None
) -> None:
    """Runs a method of a test case in `n` ranks.

    Each rank makes a test case for itself, with its `setUp` and its `tearDown`.

    Args:
        found: The test case that the caller has. Each rank's has the attributes which
            fixtures have set on it.
        method: The name of the method.
        n: How many ranks there are.
        order: The order in which they go on, as `run_ranks` takes it.
    """

    def main(rank: int) -> None:
        own = type(found)(method)
        for name, value in vars(found).items():
            vars(own).setdefault(name, value)
        result = _Errors()
        own.run(result)
        if result.found:
            raise result.found[0]

    run_ranks(main, n, order=order)


@final
class _Errors(unittest.TestResult):
    """Keeps what a test case raises, in order, as the objects that they are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[BaseException] = []

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.found.append(err[1])

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.found.append(err[1])

    def addSubTest(
        self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any
    ) -> None:
        if err is not None:
            self.found.append(err[1])

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.found.append(unittest.SkipTest(reason))


class Captured(NamedTuple):
    """What a rank has printed."""

    out: str
    err: str


@final
class OwnOutput:
    """What the fixture `capsys` is in a rank.

    It has what this rank prints, and nothing that the others print.
    """

    def __init__(self) -> None:
        self._outside = sys.stdout, sys.stderr
        self._own = io.StringIO(), io.StringIO()
        self._put_on(self._own)

    def readouterr(self) -> Captured:
        """What was printed since the last time."""
        texts = [stream.getvalue() for stream in self._own]
        for stream in self._own:
            stream.seek(0)
            stream.truncate()
        return Captured(*texts)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A block in which nothing is captured."""
        self._put_on(self._outside)
        try:
            yield
        finally:
            self._put_on(self._own)

    def close(self) -> None:
        """Ends it, and prints what nobody has read."""
        self._put_on(self._outside)
        for stream, text in zip(self._outside, self.readouterr(), strict=True):
            stream.write(text)

    @staticmethod
    def _put_on(streams: tuple[Any, Any]) -> None:
        sys.stdout, sys.stderr = streams


@contextmanager
def _own_output() -> Iterator[OwnOutput]:
    output = OwnOutput()
    try:
        yield output
    finally:
        output.close()
