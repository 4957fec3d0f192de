"""The one hook for tests: conductors, who hear what the replicas of a run come to, and may say who goes next.

    begins    a run begins                             on the thread that called it
    reached   a replica begins, meets, pauses or ends  on its own thread
    held      a meeting is held                        on the thread that called the run
    combined  gradients of several replicas become one on the thread that called the run

What a conductor raises is raised there: by the run, or by the step. Conductors are in force in a context, which the
threads of replicas inherit from the caller. Where none is, nothing happens and nothing changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

Turns = Callable[[Sequence[int]], int]
"""Which replica goes next, of those that can; they are given in replica order."""

START = "start"
END = "end"


class Instrument(ABC):
    """Hears what the replicas come to. One that gives turns has them run one at a time, wherever they are."""

    def _begins(self, num_replicas: int) -> Turns | None:
        """A run of a strategy of so many replicas begins: who gives the turns in it, if this conductor does."""
        return None

    @abstractmethod
    def _reached(self, replica: int, where: str) -> None:
        """A replica has come to its start or its end, to the meeting of that name, or to a point of a test's own."""

    def _held(self, meeting: str) -> None:
        """All replicas are at a meeting of that name."""
        return None

    def _combined_gradients(self) -> None:
        """Gradients that several replicas collected have been added up."""
        return None


_in_force: ContextVar[tuple[Instrument, ...]] = ContextVar("torchstrategy_conductors", default=())


@contextmanager
def in_force(*instruments: Instrument) -> Iterator[None]:
    """A block for whose runs these conductors are in force, beside those that are already."""
    token = _in_force.set((*_in_force.get(), *instruments))
    try:
        yield
    finally:
        _in_force.reset(token)


@contextmanager
def none_in_force() -> Iterator[None]:
    """A block whose runs no conductor hears of."""
    token = _in_force.set(())
    try:
        yield
    finally:
        _in_force.reset(token)


def is_in_force(instrument: Instrument) -> bool:
    """Whether a conductor hears of what happens here."""
    return instrument in _in_force.get()


def begins(num_replicas: int) -> Turns | None:
    """A run begins. Who gives the turns in it; None: nobody in particular.

    Raises:
        RuntimeError: If two conductors would.
    """
    givers = [(instrument, turns) for instrument in _in_force.get() if (turns := instrument._begins(num_replicas))]
    if len(givers) > 1:
        raise RuntimeError(
            f"{givers[0][0]!r} and {givers[1][0]!r} both say which replica goes next, and only one of them can. Leave "
            "one block before you enter the other."
        )
    return givers[0][1] if givers else None


def reached(replica: int, where: str) -> None:
    """A replica has come to somewhere."""
    for instrument in _in_force.get():
        instrument._reached(replica, where)


def held(meeting: str) -> None:
    """A meeting is held."""
    for instrument in _in_force.get():
        instrument._held(meeting)


def combined_gradients() -> None:
    """Gradients of several replicas have become one."""
    for instrument in _in_force.get():
        instrument._combined_gradients()


def performed(replica: int, call: Callable[[], T]) -> T:
    """Calls the step in a replica. One that raises has no end."""
    reached(replica, START)
    result = call()
    reached(replica, END)
    return result


def performed_alone(fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """A run of a lone replica, on the caller's thread."""
    if not _in_force.get():
        return fn(*args, **kwargs)
    begins(1)
    return performed(0, lambda: fn(*args, **kwargs))
