"""The hooks for tests: they hear where replicas are, and may pick the next one.

A test installs an `Instrument`, whose methods are called at these moments:

    _begins               a run begins
    _reached              a replica begins, synchronizes, pauses or ends
    _held                 all replicas are at a synchronization point
    _combined_gradients   the gradients of several replicas have been added up

`_reached` is called on the replica's own thread, and the others on the thread that
called the run.
An exception in such a method is raised at this moment: by the run, or by the step.
Instruments are installed for a block, and observe the replicas of all runs in it, on
the replicas' threads, too. Without them, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

# A function that chooses which replica goes next. It is called with the replicas that
# can go on, in replica order.
Turns = Callable[[Sequence[int]], int]

START = "start"
END = "end"


class Instrument:
    """Observes replicas.

    If it gives the turns, the replicas run one at a time, whichever devices they are
    on.
    """

    def _begins(self, num_replicas: int) -> Turns | None:
        """A run of a strategy with `num_replicas` begins.

        Returns who gives the turns in it, or None for nobody.
        """
        return None

    def _reached(self, replica: int, where: str) -> None:
        """Says that a replica has come to its start, its end, or the place `where`.

        A place is a synchronization point, or a point that a test named.
        """

    def _held(self, point: str) -> None:
        """All replicas are at the synchronization point of this name."""

    def _combined_gradients(self) -> None:
        """The gradients of several replicas have been added up."""


# The instruments that observe the runs which this thread starts; `testing/_instruments`
# installs them. A context variable, since replicas' threads take over the context of
# the caller: so an instrument sees the replicas of the runs in its block, and not those
# of other threads.
IN_FORCE: ContextVar[tuple[Instrument, ...]] = ContextVar(
    "torchstrategy_instruments", default=()
)


def tell_run_begins(num_replicas: int) -> Turns | None:
    """Tells the instruments that a run begins.

    Returns the function that gives the turns in it, or None.

    Raises:
        RuntimeError: If two instruments want to give the turns.
    """
    givers = []
    for instrument in IN_FORCE.get():
        turns = instrument._begins(num_replicas)
        if turns:
            givers.append((instrument, turns))
    if len(givers) > 1:
        raise RuntimeError(
            f"{givers[0][0]!r} and {givers[1][0]!r} both say which replica goes next, "
            "and only one of them can. Leave one block before you enter the other."
        )
    return givers[0][1] if givers else None


def tell_reached(replica: int, where: str) -> None:
    """Tells the instruments that a replica has come to `where`."""
    for instrument in IN_FORCE.get():
        instrument._reached(replica, where)


def tell_held(point: str) -> None:
    """Tells the instruments that all replicas are at a synchronization point."""
    for instrument in IN_FORCE.get():
        instrument._held(point)


def tell_combined_gradients() -> None:
    """Tells the instruments that the replicas' gradients have been added up."""
    for instrument in IN_FORCE.get():
        instrument._combined_gradients()


def call_step(replica: int, call: Callable[[], T]) -> T:
    """Calls the step in a replica, and tells the instruments of its start and end.

    They hear of no end if the step raises an error.
    """
    tell_reached(replica, START)
    result = call()
    tell_reached(replica, END)
    return result


def call_step_alone(
    fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> T:
    """Runs a strategy's only replica on the caller's thread."""
    # Without an instrument, a single replica should cost no more than a call of the
    # step.
    if not IN_FORCE.get():
        return fn(*args, **kwargs)
    tell_run_begins(1)
    return call_step(0, lambda: fn(*args, **kwargs))
