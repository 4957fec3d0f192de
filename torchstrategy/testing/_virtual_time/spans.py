"""What takes time: work on streams and engines, and waits of the program."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from torchstrategy.testing._simulation.listeners import Stream

Kind = Literal["compute", "copy", "collective"]
Phase = Literal["forward", "backward", "optimizer"]
Interval = tuple[float, float]


class Span(NamedTuple):
    """An operator, a copy or a collective, and from when to when it runs.

    The times are seconds since the block began.
    """

    device: int
    # `"stream 0"`, `"copies in"`, `"copies out"`, `"copies to sim:1"`, `"collectives"`.
    lane: str
    kind: Kind
    name: str
    start: float
    end: float
    bytes: int
    flops: int
    # The seconds that its arithmetic would take at the peak of its dtype.
    at_peak: float
    where: str  # the line of the program
    function: str  # of the program, in which that line is, as Python names it
    phase: Phase  # forward is whatever is neither backward nor the optimizer's
    host: str  # who asked for it: `"host"`, `"rank 1"`; nothing if several did
    stream: Stream | None = None  # on which it was put; None: on none
    launch: float = 0.0  # the seconds that it took the program to put it there
    # The part of the seconds that would not be there in channels-last order.
    layout: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start

    @property
    def users_function(self) -> str:
        """The name of the function: `Net.forward`; nothing at the top of a file."""
        name = self.function.rpartition("<locals>.")[2]
        return "" if name == "<module>" else name


class TimedCopy(NamedTuple):
    """A copy from one memory to another.

    Attributes:
        route: `"cpu->sim:0"`.
        bytes: How many.
        is_pinned: Whether the memory of the CPU is pinned; False between two devices.
        blocks: Whether the program waits until it is done.
        start: When it begins, in seconds since the block began.
        seconds: How long it takes.
        where: The line of the program, `"train.py:12"`.
    """

    route: str
    bytes: int
    is_pinned: bool
    blocks: bool
    start: float
    seconds: float
    where: str


class Synchronization(NamedTuple):
    """The program waits for a device.

    Attributes:
        why: What it says: `"event.synchronize()"`,
            `"aten._local_scalar_dense.default"`, `"a copy to sim:0 from memory that is
            not pinned"`.
        where: The line of the program, `"train.py:12"`.
        start: When the wait begins, in seconds since the block began.
        seconds: How long it takes; 0 if there was nothing to wait for.
        host: Who waits: `"host"`, or `"replica 1"`.
    """

    why: str
    where: str
    start: float
    seconds: float
    host: str


class CpuWork(NamedTuple):
    """An operator of the CPU."""

    host: str
    name: str
    start: float
    end: float
    bytes: int
    where: str


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in intervals that do not touch each other, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def common(one: list[Interval], other: list[Interval]) -> Iterator[Interval]:
    """The time that is in both of two lists that `united` made."""
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            yield start, end
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1


def without(one: list[Interval], other: list[Interval]) -> Iterator[Interval]:
    """The time in the first of two lists that `united` made, and not in the second."""
    edges = [-math.inf, *(edge for interval in other for edge in interval), math.inf]
    return common(one, list(zip(edges[::2], edges[1::2], strict=True)))


def during(start: float, end: float, intervals: list[Interval]) -> list[Interval]:
    """What is in one interval of a list that `united` made."""
    found: list[Interval] = []
    for i in range(bisect_right(intervals, start, key=_end_of), len(intervals)):
        if intervals[i][0] >= end:
            break
        found.append((max(start, intervals[i][0]), min(end, intervals[i][1])))
    return found


def _end_of(interval: Interval) -> float:
    return interval[1]


def length(intervals: Iterable[Interval]) -> float:
    """How many seconds some intervals are, which do not overlap."""
    return sum(end - start for start, end in intervals)
