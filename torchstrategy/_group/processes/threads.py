"""How workers meet that are threads of one process.

Whether they are, `_base/worker_threads` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final

from torchstrategy._group.processes.lifelines import Lifelines
from torchstrategy._group.processes.meeting import Entry, name_of

_T = TypeVar("_T")


@final
class MeetingOfThreads:
    """What `Meeting` is, for threads.

    Whoever runs them sees when one of them ends, so they have no lifelines.

    Args:
        count: How many workers there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.lines = Lifelines(0, 1)

    def meet(self) -> list[Entry]:
        """Who all workers are. They tell one another nothing here."""
        names = [name_of(worker, self._count) for worker in range(self._count)]
        return [
            Entry(who=name, told="", host="", addresses=[], port=0, secret="")
            for name in names
        ]

    def call_watched(self, call: Callable[[], _T]) -> _T:
        """What a call returns in which all workers take part.

        It has to be made on the thread of the worker.
        """
        return call()
