"""The clocks: of the program, of each stream, and of each engine that copies.

Note [The rules of virtual time]
1. The program puts an operator on a stream, which takes the program `launch` seconds.
   The operator begins when it is there and the stream has done what was put on it
   before. It takes as long as the cost model says.
2. A copy from or to the CPU takes the program `launch` seconds, too. It begins when it
   is there, its stream is ready, and the engine of its direction is free: each device
   has one for copies in and one for copies out. It takes `copy` seconds and its bytes
   over the bandwidth of the link. The program waits for its end, unless it is
   `non_blocking` and the memory of the CPU is pinned.
3. A copy between two devices begins when both of their current streams are ready, and
   the link between them, in this direction, is free. Both streams wait for it.
4. An event happens when all is done that was on its stream when it was recorded, but
   not before it was recorded. To record an event, to ask it, or to let a stream wait
   for it takes the program `event` seconds.
5. A number that the program reads is one copy out that takes `copy` seconds, for which
   the program waits.
6. An operator of the CPU takes `cpu_operator` seconds and its bytes over
   `cpu_bandwidth`. What it writes counts twice, since a processor reads memory before
   it writes it.
7. Other Python code takes no time.
8. Each rank of `run_ranks` is a process with a clock of its own. To call a collective
   takes it `launch` seconds. The collective begins when all ranks have called it, the
   current streams of their devices are ready, and no other collective goes over their
   links. It takes `collective` seconds and, in a ring, its bytes over the bandwidth of
   the links. Waiting on it makes the current stream wait; the program itself waits for
   a barrier, and for collectives of tensors of the CPU, whose bytes go over
   `cpu_bandwidth`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._simulation.accelerator import depth_of_backward
from torchstrategy.testing._simulation.accounts import held
from torchstrategy.testing._simulation.listeners import (
    Copy,
    Kernel,
    Launch,
    Listener,
    Meeting,
    Stream,
)
from torchstrategy.testing._simulation.ordinals import Spoken
from torchstrategy.testing._simulation.program import Call, users_call, users_place
from torchstrategy.testing._virtual_time.acts import (
    Act,
    Awaits,
    Begins,
    Ends,
    Follows,
    Joins,
    Meets,
    Moment,
    Notes,
    Optimizes,
    Pauses,
    StepEnds,
)
from torchstrategy.testing._virtual_time.costs import (
    CostModel,
    collective_seconds,
    name_of,
    size_of,
)
from torchstrategy.testing._virtual_time.hosts import Hosts
from torchstrategy.testing._virtual_time.profiles import GIB, DeviceProfile
from torchstrategy.testing._virtual_time.spans import (
    CpuWork,
    Kind,
    Phase,
    Span,
    Synchronization,
    TimedCopy,
)

_READ = "_local_scalar_dense"
_ROUNDING = 1e-12  # seconds; sums of the same durations in another order differ by less
_Engine = tuple[int, str]  # of a device: "copies in"


class _Task(NamedTuple):
    """Work that a stream is to do."""

    kind: Kind
    name: str
    seconds: float
    bytes: int
    flops: int = 0
    at_peak: float = 0.0
    layout: float = 0.0


@final
class _Here(threading.local):
    # The depth of backward at which this thread's optimizer began its step; None: it
    # makes none.
    depth: int | None = None


@final
class Clock(Listener):
    """Says when everything happens that it is told of. Threads may share it."""

    looks_at_launches = False  # what an operator costs is known when it has run

    def __init__(self, profile: DeviceProfile, hosts: Hosts, devices: int) -> None:
        self.profile, self.hosts = profile, hosts
        self.spans: list[Span] = []
        self.copies: list[TimedCopy] = []
        self.synchronizations: list[Synchronization] = []
        self.cpu_work: list[CpuWork] = []
        # When all work of each step is done, for the program or its first rank.
        self.ends: list[float] = []
        self.acts: list[Act] = []
        self.costs = CostModel(profile)
        # For each stretch between two marks, the peak of each device.
        self._peaks = [{device: held(device) for device in range(devices)}]
        self._ready: dict[Stream, float] = defaultdict(float)
        self._free: dict[_Engine, float] = defaultdict(float)
        # For each device, how many streams it has without the default one.
        self._numbers: dict[int, int] = defaultdict(int)
        self._lanes: dict[Stream, str] = {}
        self._here = _Here()
        # Memory may be freed, and say so, while this thread holds the lock.
        self._lock = threading.RLock()

    @property
    def end(self) -> float:
        """When the program and all streams are done."""
        return max(
            [self.hosts.program.now, self.hosts.here().now, *self._ready.values()]
        )

    @property
    def end_here(self) -> float:
        """When the program is done with what it has asked for until now.

        On the thread of a rank, it is when this rank is done.
        """
        host = self.hosts.here()
        return max(host.now, host.done)

    def begin_peaks(self) -> None:
        """Counts the peaks of memory from here on."""
        self._peaks.append({device: held(device) for device in self._peaks[0]})

    def peaks(self, first: int, last: int | None) -> dict[int, int]:
        """The most bytes that each device held since a call of `begin_peaks`.

        The count ends before the next such call.
        """
        return {
            device: max(peaks[device] for peaks in self._peaks[first:last])
            for device in self._peaks[0]
        }

    def step_ends(self, rank: int, count: int) -> None:
        """Notes that a step of the program, or of one of its ranks, has ended."""
        if not rank:
            self.ends.append(self.end_here)
            self.acts.append(StepEnds(self.hosts.here().name))

    def optimizer_begins(self) -> None:
        """Notes that `optimizer.step()` begins on this thread."""
        self._here.depth = depth_of_backward()
        self.acts.append(Optimizes(self.hosts.here().name, True))

    def optimizer_ends(self, fused: tuple[float, int] | None) -> None:
        """Notes that it has ended.

        Args:
            fused: The seconds and the launches of the same step, if it were fused; None
                if it is, or cannot be.
        """
        self._here.depth = None
        self.acts.append(Optimizes(self.hosts.here().name, False, fused))

    @override
    def launched(self, launch: Launch) -> None:
        raise AssertionError("a clock does not look at launches")

    @override
    def computed(self, kernel: Kernel) -> None:
        name = name_of(kernel.operator)
        if name == _READ:
            engine = kernel.stream[0], "copies out"
            size = kernel.args[0].element_size()
            self._put(
                kernel.stream, _Task("copy", name, self.profile.copy, size), engine
            )
            return
        cost = self.costs.of(
            kernel.operator, kernel.args, kernel.kwargs, kernel.results
        )
        if cost is not None:
            # An operator on lists launches kernel after kernel in one call: what is
            # Python's is spent once.
            launch = self.profile.launch * (1 + (cost.launches - 1) / 2)
            task = _Task(
                "compute",
                name,
                cost.seconds,
                cost.bytes,
                cost.flops,
                cost.at_peak,
                cost.layout,
            )
            self._put(kernel.stream, task, launch=launch)

    @override
    def copied(self, copy: Copy) -> None:
        source, target = copy.tensors
        if copy.source is not None and copy.target is not None:
            if copy.source[0] == copy.target[0]:
                cost = self.costs.copy_within(source, target)
                self._put(
                    copy.stream, _Task("compute", "copy_", cost.seconds, cost.bytes)
                )
            else:
                self._copy_between(copy, copy.source, copy.target)
            return
        device, comes = copy.stream[0], copy.source is None
        bandwidth = self.profile.pinned if copy.is_pinned else self.profile.pageable
        task = _Task("copy", "copy_", self._copying(copy, bandwidth), _bytes(copy))
        span = self._put(
            copy.stream, task, (device, "copies in" if comes else "copies out")
        )
        route = f"cpu->sim:{device}" if comes else f"sim:{device}->cpu"
        self._note(copy, span, route)
        if copy.blocks:
            memory = "pinned memory" if copy.is_pinned else "memory that is not pinned"
            # Ranks do the same, each on its own device.
            here = "its device" if self.hosts.here().is_rank else f"sim:{device}"
            way = f"to {here} from {memory}" if comes else f"from {here} to {memory}"
            self._wait(span.end, f"a copy {way}", users_call())

    def _copy_between(self, copy: Copy, source: Stream, target: Stream) -> None:
        with self._lock:
            self._ready[source] = max(self._ready[source], self._ready[target])
            self.acts.append(Joins(source, target))
            task = _Task(
                "copy", "copy_", self._copying(copy, self.profile.peer), _bytes(copy)
            )
            span = self._put(source, task, (source[0], f"copies to sim:{target[0]}"))
            self._ready[target] = self._ready[source]
            self.acts.append(Joins(target, source))
            self._note(copy, span, f"sim:{source[0]}->sim:{target[0]}")

    def _copying(self, copy: Copy, bandwidth: float) -> float:
        return self.profile.copy + _bytes(copy) / (bandwidth * 1e9)

    def _note(self, copy: Copy, span: Span, route: str) -> None:
        made = TimedCopy(
            route,
            span.bytes,
            copy.is_pinned,
            copy.blocks,
            span.start,
            span.seconds,
            span.where,
        )
        self.copies.append(made)

    @override
    def made(self, stream: Stream, address: int) -> None:
        device, memory, now = stream[0], self.profile.memory, held(stream[0])
        with self._lock:
            self._peaks[-1][device] = max(self._peaks[-1][device], now)
        if now > memory:
            raise torch.OutOfMemoryError(
                f"{Spoken.library()} out of memory. sim:{device} is out of memory: the "
                f"tensors on it would hold {now / GIB:.2f} GiB, and "
                f"{self.profile.name} has {memory / GIB:.2f} GiB. Use a smaller batch, "
                "recompute activations (torch.utils.checkpoint), or ask virtual_time "
                "for another profile."
            )

    @override
    def freed(self, address: int) -> None:
        pass  # taking and giving memory takes no time: torch keeps it

    @override
    def guarded(self, stream: Stream, tensor: torch.Tensor) -> None:
        pass

    @override
    def moment(self, stream: Stream) -> Moment:
        with self._lock:
            self._pause(self.profile.event)
            return self._noted(stream)

    @override
    def waits(self, stream: Stream, moment: Moment) -> None:
        with self._lock:
            self._pause(self.profile.event)
            self._ready[stream] = max(self._ready[stream], moment)
            self.acts.append(Follows(stream, moment.number))

    @override
    def waits_for_stream(self, stream: Stream, other: Stream) -> None:
        # PyTorch does the same with an event.
        self.waits(stream, self.moment(other))

    @override
    def synchronized(self, moment: Moment) -> None:
        self._wait(moment, "event.synchronize()", users_call(), moment=moment.number)

    @override
    def synchronized_stream(self, stream: Stream, why: str) -> None:
        self._wait(self._ready[stream], why, users_call(), stream)

    @override
    def synchronized_device(self, device: int) -> None:
        ready = [
            moment
            for stream, moment in list(self._ready.items())
            if stream[0] == device
        ]
        self._wait(
            max(ready, default=0.0), "synchronize()", users_call(), device=device
        )

    @override
    def used_on_cpu(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        if name.startswith("tensor."):
            return  # another name for the memory; what reads it is no operator
        size = sum(map(size_of, read)) + 2 * sum(map(size_of, written))
        with self._lock:
            host = self.hosts.here()
            start = host.now
            self._pause(
                self.profile.cpu_operator + size / (self.profile.cpu_bandwidth * 1e9)
            )
            self.cpu_work.append(
                CpuWork(host.name, name, start, host.now, size, users_place())
            )

    @override
    def rank_begins(self, rank: int) -> None:
        with self._lock:
            self.acts.append(Begins(self.hosts.rank_begins(rank).name))

    @override
    def ranks_end(self) -> None:
        self.hosts.ranks_end()
        self.acts.append(Ends())

    @override
    def came(self, stream: Stream | None) -> Moment:
        with self._lock:
            self._pause(self.profile.launch)
            return self._noted(stream, is_bucket=users_call().way == "engine")

    @override
    def met(self, meeting: Meeting) -> Moment:
        kind, size, arrivals = meeting
        # A link carries messages in both directions at once.
        lanes = (
            ["messages out", "messages in"]
            if kind == "send"
            else ["collectives"] * len(arrivals)
        )
        links = [
            (arrival.stream[0], lane, arrival.where)
            for arrival, lane in zip(arrivals, lanes, strict=True)
            if arrival.stream is not None
        ]
        with self._lock:
            start: float = max(arrival.moment for arrival in arrivals)
            start = max(
                [start, *(self._free[device, lane] for device, lane, _ in links)]
            )
            end = start + collective_seconds(
                kind, size, len(arrivals), bool(links), self.profile
            )
            for device, lane, where in links:
                self._free[device, lane] = end
                self.spans.append(
                    Span(
                        device,
                        lane,
                        "collective",
                        kind,
                        start,
                        end,
                        size,
                        0,
                        0.0,
                        where,
                        "",
                        "forward",
                        "",
                    )
                )
            over = self._moment(end)
            numbers = tuple(arrival.moment.number for arrival in arrivals)
            self.acts.append(
                Meets(
                    kind,
                    size,
                    numbers,
                    tuple((device, lane) for device, lane, _ in links),
                    over.number,
                )
            )
        return over

    @override
    def received(self, stream: Stream | None, moment: Moment, kind: str) -> None:
        if stream is None or kind == "barrier":
            self._wait(moment, f"a {kind} of ranks", users_call(), moment=moment.number)
        else:
            self.waits(stream, moment)

    @override
    def is_over(self, moment: float) -> bool:
        self._pause(self.profile.event)  # so that a loop that asks comes to an end
        return moment <= self.hosts.here().now + _ROUNDING

    @override
    def is_idle(self, stream: Stream) -> bool:
        return self.is_over(self._ready[stream])

    @override
    def seconds_between(self, start: float, end: float) -> float | None:
        return end - start

    def _put(
        self,
        stream: Stream,
        task: _Task,
        engine: _Engine | None = None,
        launch: float | None = None,
    ) -> Span:
        """Puts work on a stream, and on an engine if it is a copy."""
        with self._lock:
            host, launch = (
                self.hosts.here(),
                self.profile.launch if launch is None else launch,
            )
            host.spend(launch)
            start = max(host.now, self._ready[stream])
            if engine is not None:
                start = max(start, self._free[engine])
            end = start + task.seconds
            self._ready[stream] = end
            host.done = max(host.done, end)
            if engine is not None:
                self._free[engine] = end
            lane = (
                engine[1]
                if engine is not None
                else self._lanes.get(stream) or self._lane(stream)
            )
            line, function, way = users_call()
            span = Span(
                stream[0],
                lane,
                task.kind,
                task.name,
                start,
                end,
                task.bytes,
                task.flops,
                task.at_peak,
                line,
                function,
                self._phase(way),
                host.name,
                stream,
                launch,
                task.layout,
            )
            self.spans.append(span)
            self.acts.append(span)
            return span

    def _phase(self, way: str) -> Phase:
        if way == "optimizer" or self._here.depth is not None:
            # An optimizer may call backward, as LBFGS does, and backward an optimizer.
            return (
                "backward"
                if depth_of_backward() > (self._here.depth or 0)
                else "optimizer"
            )
        return "backward" if depth_of_backward() else "forward"

    def _pause(self, seconds: float) -> None:
        """Lets the program be busy for a while."""
        host = self.hosts.here()
        host.spend(seconds)
        self.acts.append(Pauses(host.name, seconds))

    def _noted(self, stream: Stream | None, is_bucket: bool = False) -> Moment:
        """The moment at which a stream is ready and the program is here.

        The acts get the moment, too.
        """
        host = self.hosts.here()
        moment = self._moment(
            host.now if stream is None else max(host.now, self._ready[stream])
        )
        self.acts.append(Notes(host.name, stream, moment.number, is_bucket))
        return moment

    def _moment(self, seconds: float) -> Moment:
        moment = Moment(seconds)
        moment.number = len(self.acts)
        return moment

    def _lane(self, stream: Stream) -> str:
        """`"stream 0"` for the default stream, or a number in the order of first use.

        The number is the same in every run.
        """
        device, number = stream
        if number:
            self._numbers[device] += 1
        self._lanes[stream] = f"stream {self._numbers[device] if number else 0}"
        return self._lanes[stream]

    def _wait(self, until: float, why: str, call: Call, *on: Any, **known: Any) -> None:
        """Lets the program wait until a moment.

        `on` and `known` say what it waits for, as `Awaits` takes them.
        """
        with self._lock:
            host = self.hosts.here()
            start = host.now
            waited = host.wait_until(until)
            self.synchronizations.append(
                Synchronization(why, call.line, start, waited, host.name)
            )
            self.acts.append(Awaits(host.name, why, call.line, call.way, *on, **known))


def _bytes(copy: Copy) -> int:
    """What goes over the link: torch changes the dtype on the device."""
    source, target = copy.tensors
    if source.dtype == target.dtype:
        return max(size_of(source), size_of(target))
    return size_of(source if copy.source is None else target)
