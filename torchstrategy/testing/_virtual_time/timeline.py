"""A stretch of virtual time, and what can be computed of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torchstrategy.testing._virtual_time.profiles import DeviceProfile
from torchstrategy.testing._virtual_time.spans import (
    CpuWork,
    Interval,
    Kind,
    Span,
    Synchronization,
    TimedCopy,
    common,
    during,
    length,
    united,
    without,
)


class DeviceTime(NamedTuple):
    """What one device does in a stretch of virtual time.

    Attributes:
        busy: Seconds in which it computes.
        idle: Seconds in which it does not, whatever is copied meanwhile.
        copying: Seconds in which something is copied from or to it.
        peak_bytes: The most bytes that tensors on it hold.
        flops: Floating-point operations.
        mfu: Model flops utilization: the part of the time that `flops` would take at
            the peaks of their dtypes.
        communicating: Seconds in which it takes part in collectives of ranks.
    """

    busy: float
    idle: float
    copying: float
    peak_bytes: int
    flops: int
    mfu: float
    communicating: float


class Wait(NamedTuple):
    """All waits of one line for one reason."""

    why: str
    where: str
    seconds: float
    times: int
    # The seconds of the wait in which no device computes that the program puts work on.
    idle: float


@final
@dataclass(frozen=True)
class Timeline:
    """What happens from one moment to another one."""

    profile: DeviceProfile
    since: float
    until: float
    spans: Sequence[Span]
    copies: Sequence[TimedCopy]
    synchronizations: Sequence[Synchronization]
    cpu_work: Sequence[CpuWork]
    peaks: Mapping[int, int]  # bytes, by device
    ends: Sequence[float] = ()  # when the steps that end in it are done
    begin: float | None = None  # when the first of them begins; None: nobody knows

    @property
    def seconds(self) -> float:
        return self.until - self.since

    @property
    def devices(self) -> list[int]:
        """Those that have something to do, in order."""
        return sorted({span.device for span in self.spans})

    def times(self, device: int, kind: Kind) -> list[Interval]:
        """When a device does one kind of work, from the beginning of the stretch on."""
        return united(
            (max(span.start, self.since), min(span.end, self.until))
            for span in self.spans
            if span.device == device and span.kind == kind
        )

    def device(self, index: int) -> DeviceTime:
        """What one device does."""
        busy, mine = (
            length(self.times(index, "compute")),
            [span for span in self.spans if span.device == index],
        )
        return DeviceTime(
            busy=busy,
            idle=max(0.0, self.seconds - busy),
            copying=length(self.times(index, "copy")),
            peak_bytes=self.peaks.get(index, 0),
            flops=sum(span.flops for span in mine),
            mfu=sum(span.at_peak for span in mine) / self.seconds
            if self.seconds
            else 0.0,
            communicating=length(self.times(index, "collective")),
        )

    def overlap(self, one: Kind, other: Kind, device: int | None = None) -> float:
        """How much of one kind of work a device does while it does the other kind.

        The result is a part of the time of the one kind.
        """
        whole = shared = 0.0
        for index in self.devices if device is None else [device]:
            times = self.times(index, one)
            whole += length(times)
            shared += length(common(times, self.times(index, other)))
        return shared / whole if whole else 1.0

    def waits(self) -> list[Wait]:
        """What the program waits for: first what matters, and then the longest waits.

        A wait matters if devices are idle for long because of it.
        """
        found: dict[tuple[str, str], Wait] = {}
        idle = self.idle_by_host()
        for one in self.synchronizations:
            why, where, seconds, times, lost = found.get(
                (one.why, one.where), Wait(one.why, one.where, 0.0, 0, 0.0)
            )
            lost += length(
                during(one.start, one.start + one.seconds, idle.get(one.host, []))
            )
            found[why, where] = Wait(why, where, seconds + one.seconds, times + 1, lost)
        least = MATTERS * self.seconds
        return sorted(
            found.values(),
            key=lambda wait: (-wait.idle if wait.idle > least else 0.0, -wait.seconds),
        )

    def idle_by_host(self) -> dict[str, list[Interval]]:
        """When no device computes what one program, or one rank, puts work on.

        In these times, no device takes part in a collective either.
        """
        devices: dict[str, set[int]] = {}
        for span in self.spans:
            devices.setdefault(span.host, set()).add(span.device)
        for one in self.synchronizations:
            devices.setdefault(one.host, set())
        everywhere = set(self.devices)
        busy = {device: self.busy(device) for device in everywhere}
        return {
            host: list(
                without(
                    [(self.since, self.until)],
                    united(
                        interval
                        for device in mine or everywhere
                        for interval in busy[device]
                    ),
                )
            )
            for host, mine in devices.items()
        }

    def busy(self, device: int) -> list[Interval]:
        """When a device computes or takes part in a collective."""
        return united(
            [*self.times(device, "compute"), *self.times(device, "collective")]
        )

    def idle(self, device: int) -> list[Interval]:
        """When it does neither."""
        return list(without([(self.since, self.until)], self.busy(device)))

    @property
    def is_training(self) -> bool:
        """Whether there is a backward pass, or a step of an optimizer."""
        return any(span.phase != "forward" for span in self.spans)

    def lanes(self) -> Iterator[tuple[str, Sequence[Span | Synchronization | CpuWork]]]:
        """What to draw, with a line for each.

        The lines are the program, and the streams and engines of each device.
        """
        for host in sorted(
            {one.host for one in self.synchronizations}
            | {one.host for one in self.cpu_work}
        ):
            waits = [
                one for one in self.synchronizations if one.host == host and one.seconds
            ]
            yield host, [*waits, *(work for work in self.cpu_work if work.host == host)]
        is_training = self.is_training
        for device in self.devices:
            lanes: dict[str, list[Span]] = {}
            for span in self.spans:
                if span.device == device:
                    is_phase = (
                        is_training
                        and span.kind == "compute"
                        and span.lane == DEFAULT_LANE
                    )
                    lanes.setdefault(span.phase if is_phase else span.lane, []).append(
                        span
                    )
            for lane in sorted(lanes, key=_order_of_lane):
                yield f"sim:{device}, {lane}", lanes[lane]


DEFAULT_LANE = "stream 0"
# The part of the time that a device has to be idle for a wait to matter.
MATTERS = 0.005
_PHASES = ("forward", "backward", "optimizer")


def _order_of_lane(lane: str) -> tuple[bool, bool, int, str]:
    """Phases first, the work on the default stream, then streams, then engines."""
    phase = _PHASES.index(lane) if lane in _PHASES else 0
    return lane not in _PHASES, not lane.startswith("stream"), phase, lane
