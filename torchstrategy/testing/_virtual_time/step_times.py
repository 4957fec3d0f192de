"""What each step of a program takes, without what comes before and after them."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar, final

from torchstrategy.testing._virtual_time.spans import Interval, common, length, united
from torchstrategy.testing._virtual_time.timeline import Timeline

_Thing = TypeVar("_Thing")


class DeviceStep(NamedTuple):
    """What one device does in a step, in seconds.

    Attributes:
        computes: In which it computes.
        copies: In which something is copied from or to it.
        exposed: In which it takes part in collectives and does not compute.
        idle: In which it does neither, whatever is copied meanwhile.
        mfu: Model flops utilization.
        hidden_copies: The part of the copying during which it computes.
    """

    computes: float
    copies: float
    exposed: float
    idle: float
    mfu: float
    hidden_copies: float


@final
@dataclass(frozen=True)
class StepTime:
    """What a step takes, in seconds.

    Attributes:
        seconds: All of it.
        devices: What each device does.
        waits_while_idle: In which the program waits while no device of it computes; of
            ranks, on average.
        waits_while_busy: In which it waits while one does, which costs nothing by
            itself.
    """

    seconds: float
    devices: Mapping[int, DeviceStep]
    waits_while_idle: float
    waits_while_busy: float


@final
@dataclass(frozen=True)
class Steps:
    """The steps of a stretch of virtual time.

    Attributes:
        set_up: The seconds before them; they have the first step in them if nobody
            knows where it begins.
        has_first: Whether they do.
        times: Of each step.
        after: The seconds after them.
        all: The stretch without set-up, and without what comes after the last step.
    """

    set_up: float
    has_first: bool
    times: Sequence[StepTime]
    after: float
    all: Timeline

    def typical(self) -> StepTime:
        """A step in the middle, by its seconds."""
        middle = statistics.median_low(time.seconds for time in self.times)
        return next(time for time in self.times if time.seconds == middle)


def steps_of(timeline: Timeline) -> Steps | None:
    """The steps; None if there are less than two of which the beginning is known."""
    known = [] if timeline.begin is None else [timeline.begin]
    bounds = [*known, *(end for end in timeline.ends if not known or end > known[0])]
    if len(bounds) < 3:
        return None
    parts = _divided(timeline, bounds)
    return Steps(
        set_up=bounds[0] - timeline.since,
        has_first=timeline.begin is None,
        times=[_step_time(part) for part in parts],
        after=max(0.0, timeline.until - bounds[-1]),
        all=_between(timeline, bounds[0], bounds[-1]),
    )


def _step_time(part: Timeline) -> StepTime:
    waits: dict[str, list[Interval]] = {}
    for one in part.synchronizations:
        start, end = (
            max(one.start, part.since),
            min(one.start + one.seconds, part.until),
        )
        if start < end:
            waits.setdefault(one.host, []).append((start, end))
    idle = part.idle_by_host() if waits else {}
    lost = [
        length(common(united(some), idle.get(host, []))) for host, some in waits.items()
    ]
    whole = [length(united(some)) for some in waits.values()]
    hosts = max(1, len(waits))
    return StepTime(
        seconds=part.seconds,
        devices={device: _device_step(part, device) for device in part.devices},
        waits_while_idle=sum(lost) / hosts,
        waits_while_busy=(sum(whole) - sum(lost)) / hosts,
    )


def _device_step(part: Timeline, device: int) -> DeviceStep:
    computing, busy = length(part.times(device, "compute")), length(part.busy(device))
    return DeviceStep(
        computes=computing,
        copies=length(part.times(device, "copy")),
        exposed=busy - computing,
        idle=max(0.0, part.seconds - busy),
        mfu=mfu(part, device),
        hidden_copies=part.overlap("copy", "compute", device),
    )


def mfu(part: Timeline, device: int) -> float:
    """Model flops utilization of what begins in a stretch."""
    mine = (
        span
        for span in part.spans
        if span.device == device and part.since <= span.start < part.until
    )
    return sum(span.at_peak for span in mine) / part.seconds if part.seconds else 0.0


def _between(timeline: Timeline, since: float, until: float) -> Timeline:
    (part,) = _divided(timeline, [since, until])
    return part


def _divided(timeline: Timeline, bounds: Sequence[float]) -> list[Timeline]:
    """The stretches from each bound to the next one.

    Each thing is in every stretch in which it runs, even for a short while.
    """
    spans = _sorted_into(bounds, timeline.spans, lambda span: (span.start, span.end))
    waits = _sorted_into(
        bounds,
        timeline.synchronizations,
        lambda one: (one.start, one.start + one.seconds),
    )
    copies = _sorted_into(
        bounds, timeline.copies, lambda copy: (copy.start, copy.start)
    )
    work = _sorted_into(bounds, timeline.cpu_work, lambda one: (one.start, one.start))
    return [
        replace(
            timeline,
            since=since,
            until=until,
            spans=spans[i],
            copies=copies[i],
            synchronizations=waits[i],
            cpu_work=work[i],
            ends=(),
            begin=None,
        )
        for i, (since, until) in enumerate(pairwise(bounds))
    ]


def _sorted_into(
    bounds: Sequence[float],
    things: Sequence[_Thing],
    times: Callable[[_Thing], Interval],
) -> list[list[_Thing]]:
    parts: list[list[_Thing]] = [[] for _ in bounds[1:]]
    for thing in things:
        start, end = times(thing)
        first = max(bisect_right(bounds, start) - 1, 0)
        for i in range(first, len(parts)):
            if i > first and bounds[i] >= end:
                break
            if end >= bounds[i] and start < bounds[i + 1]:
                parts[i].append(thing)
    return parts
