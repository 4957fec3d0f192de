"""Workers that are threads of one process, as `torchstrategy.testing.run_ranks` runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

from torchstrategy._communication.lifelines import Lifelines
from torchstrategy._communication.meeting import name_of

_T = TypeVar("_T")


@final
class _Here(threading.local):
    is_worker = False


_here = _Here()


@contextmanager
def worker_here() -> Iterator[None]:
    """A block in which this thread is a worker, which other workers of this process join."""
    _here.is_worker = True
    try:
        yield
    finally:
        _here.is_worker = False


def are_threads() -> bool:
    """Whether the workers that this thread joins are threads of this process."""
    return _here.is_worker


@final
class MeetingOfThreads:
    """What `Meeting` is, for threads. Whoever runs them sees when one of them ends, so they have no lifelines.

    Args:
        count: How many workers there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.lines = Lifelines(0, 1)

    def meet(self) -> list[str]:
        """The names of all workers."""
        return [name_of(worker, self._count) for worker in range(self._count)]

    def watched(self, call: Callable[[], _T]) -> _T:
        """What a call returns in which all workers take part. It has to be made on the thread of the worker."""
        return call()
