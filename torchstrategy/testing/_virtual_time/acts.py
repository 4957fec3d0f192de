"""What a clock was told, in order, to be played again with something changed.

A `Span` among the acts is work that was put on a stream: it says itself how long it
takes.
"""

from __future__ import annotations

from typing import NamedTuple

from torchstrategy.testing._simulation.listeners import Stream
from torchstrategy.testing._virtual_time.spans import Span


class Moment(float):
    """A moment that a clock has given away.

    It has a number, by which the clock knows it when it comes back.
    """

    __slots__ = ("number",)

    number: int


class Pauses(NamedTuple):
    """The program is busy for a while."""

    host: str
    seconds: float


class Awaits(NamedTuple):
    """The program waits for a moment, a stream or a device.

    With none of these, it waits for what it put on a stream last.
    """

    host: str
    why: str
    where: str
    way: str  # see `program.Call`
    stream: Stream | None = None
    device: int | None = None
    moment: int | None = None


class Notes(NamedTuple):
    """A moment is given away: when a stream is ready, or, with None, now."""

    host: str
    stream: Stream | None
    number: int
    # Whether `DistributedDataParallel` brings a bucket of gradients at this moment.
    is_bucket: bool = False


class Follows(NamedTuple):
    """A stream waits for a moment."""

    stream: Stream
    moment: int


class Joins(NamedTuple):
    """A stream waits for another one."""

    stream: Stream
    other: Stream


class Meets(NamedTuple):
    """All ranks have come to a collective."""

    kind: str
    bytes: int
    arrivals: tuple[int, ...]  # the numbers of the moments at which they have
    links: tuple[tuple[int, str], ...]  # devices and lanes
    number: int  # of the moment at which it is over


class Begins(NamedTuple):
    """A rank begins, when the program is where it is."""

    host: str


class Ends(NamedTuple):
    """All ranks have ended, and the program goes on."""


class StepEnds(NamedTuple):
    """A step of the program has ended."""

    host: str


class Optimizes(NamedTuple):
    """`optimizer.step()` begins, or ends."""

    host: str
    begins: bool
    # The seconds and the launches of the same step, if it were fused.
    fused: tuple[float, int] | None = None


Act = (
    Span
    | Pauses
    | Awaits
    | Notes
    | Follows
    | Joins
    | Meets
    | Begins
    | Ends
    | StepEnds
    | Optimizes
)
