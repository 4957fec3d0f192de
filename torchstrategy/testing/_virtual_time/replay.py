"""The acts of a clock, played again: unchanged, everything happens as it did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, final

from torchstrategy.testing._simulation.listeners import Stream
from torchstrategy.testing._virtual_time.acts import (
    Act,
    Awaits,
    Begins,
    Ends,
    Follows,
    Joins,
    Meets,
    Notes,
    Optimizes,
    Pauses,
    StepEnds,
)
from torchstrategy.testing._virtual_time.costs import collective_seconds
from torchstrategy.testing._virtual_time.hosts import Host
from torchstrategy.testing._virtual_time.profiles import DeviceProfile
from torchstrategy.testing._virtual_time.spans import Span


def played(acts: Iterable[Act], profile: DeviceProfile) -> list[float]:
    """When the steps end, as a clock would note it that is told of these acts."""
    replay = _Replay(profile)
    for act in acts:
        replay.play[type(act)](act)
    return replay.ends


@final
class _Replay:
    """Follows the rules of `clock`, by the seconds that are in the acts."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.ends: list[float] = []
        self._profile = profile
        self._hosts: dict[str, Host] = {"host": Host()}
        self._ready: dict[Stream, float] = defaultdict(float)
        self._free: dict[tuple[int, str], float] = defaultdict(float)
        self._moments: dict[int, float] = {}
        # For each host, the end of what it put on a stream last.
        self._last: dict[str, float] = {}
        self.play: dict[type, Callable[[Any], None]] = {
            Span: self._put,
            Pauses: lambda act: self._hosts[act.host].spend(act.seconds),
            Awaits: self._await,
            Notes: self._note,
            Follows: self._follow,
            Joins: self._join,
            Meets: self._meet,
            Begins: self._begin,
            Ends: self._end,
            StepEnds: self._end_step,
            Optimizes: lambda act: None,
        }

    def _put(self, span: Span) -> None:
        assert span.stream is not None
        host = self._hosts[span.host]
        host.spend(span.launch)
        start = max(host.now, self._ready[span.stream])
        engine = span.device, span.lane
        if span.kind == "copy":
            start = max(start, self._free[engine])
        end = start + span.seconds
        if span.kind == "copy":
            self._free[engine] = end
        self._ready[span.stream] = self._last[span.host] = end
        host.done = max(host.done, end)

    def _await(self, act: Awaits) -> None:
        if act.moment is not None:
            moment = self._moments[act.moment]
        elif act.stream is not None:
            moment = self._ready[act.stream]
        elif act.device is not None:
            moment = max(
                (
                    ready
                    for (device, _), ready in self._ready.items()
                    if device == act.device
                ),
                default=0.0,
            )
        else:
            moment = self._last[act.host]
        self._hosts[act.host].wait_until(moment)

    def _note(self, act: Notes) -> None:
        now = self._hosts[act.host].now
        self._moments[act.number] = (
            now if act.stream is None else max(now, self._ready[act.stream])
        )

    def _follow(self, act: Follows) -> None:
        self._ready[act.stream] = max(
            self._ready[act.stream], self._moments[act.moment]
        )

    def _join(self, act: Joins) -> None:
        self._ready[act.stream] = max(self._ready[act.stream], self._ready[act.other])

    def _meet(self, act: Meets) -> None:
        start = max(self._moments[number] for number in act.arrivals)
        start = max([start, *(self._free[link] for link in act.links)])
        end = start + collective_seconds(
            act.kind, act.bytes, len(act.arrivals), bool(act.links), self._profile
        )
        self._free.update(dict.fromkeys(act.links, end))
        self._moments[act.number] = end

    def _begin(self, act: Begins) -> None:
        self._hosts[act.host] = Host(self._hosts["host"].now, name=act.host, rank=0)

    def _end(self, _: Ends) -> None:
        program = self._hosts["host"]
        program.now = max(host.now for host in self._hosts.values())

    def _end_step(self, act: StepEnds) -> None:
        host = self._hosts[act.host]
        self.ends.append(max(host.now, host.done))
