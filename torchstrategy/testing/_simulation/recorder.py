"""Records the work on simulated devices' streams, and finds races.

Two streams may race, or a stream and the program.

Simulated devices do all work at once. On a real device a stream does its work some time
later, and the work of two streams is ordered only where one waits for the other. For
each stream, the recorder keeps a vector clock: how much of every stream's work is known
to be done before the next work of this stream. If work uses memory that another stream
uses, and the order of the two is not known, that is a race. The same holds for pinned
memory of the CPU that a copy reads or writes while the program goes on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy._base.memory import extent
from torchstrategy.testing._simulation.checksums import Checksums, UnderWay
from torchstrategy.testing._simulation.listeners import (
    Copy,
    Kernel,
    Launch,
    Listener,
    Meeting,
    Stream,
    listeners,
    listening,
)
from torchstrategy.testing._simulation.ordinals import is_simulated
from torchstrategy.testing._simulation.program import users_line, watching_the_cpu
from torchstrategy.testing._simulation.uses import WHOLE, Span, Uses

Clock = dict[Stream, int]
"""For each stream, how many of its pieces of work are done."""


class StreamEvent(NamedTuple):
    """Something that happened on a stream.

    `what` is `"launch"`, `"wait"`, `"record"`, `"synchronize"` or `"use"`.
    """

    device: int
    stream: int
    what: str
    about: str


class _Work(NamedTuple):
    stream: Stream
    time: int
    name: str
    where: str


class _Place(NamedTuple):
    """A part of a storage."""

    address: int  # of the storage
    span: Span


@final
class _Memory:
    """The last uses of a piece of memory, for which its next use may have to wait."""

    def __init__(self, home: Stream | None) -> None:
        # The stream that may reuse the memory when it is free. None: it was allocated
        # before the record began.
        self.home = home
        self.written: Uses[_Work] = Uses()
        self.read: dict[Stream, Uses[_Work]] = {}  # since it was last written
        self.guarded: set[Stream] = set()  # the streams that `record_stream` named

    def read_within(self, span: Span) -> list[_Work]:
        """What has last read any byte of a span, for each stream."""
        return [work for uses in self.read.values() for work in uses.within(span)]

    def all(self) -> list[_Work]:
        """All uses of any part."""
        return [
            work for uses in (self.written, *self.read.values()) for work in uses.all()
        ]


@final
class Recorder(Listener):
    """A record of the work on streams. Threads may share it.

    Attributes:
        events: The events, in order.
        races: The races that may happen on a real device, in words; each once.
    """

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        self.races: list[str] = []
        self._clocks: dict[Stream, Clock] = {}
        # How much of every stream's work the program has waited for.
        self._host: Clock = {}
        self._memory: dict[int, _Memory] = {}
        # The work that may still use free memory, by the stream to which the memory
        # belongs.
        self._returned: dict[Stream, list[_Work]] = {}
        self._under_way = Checksums()
        # Pinned memory that copies used while the program went on.
        self._of_cpu: dict[int, _Memory] = {}
        # Memory may be freed, and say so, while this thread holds the lock.
        self._lock = threading.RLock()

    @override
    def launched(self, launch: Launch) -> None:
        with self._lock:
            self._launch(
                launch.stream,
                launch.name,
                _places(launch.read),
                _places(launch.written),
            )

    @override
    def computed(self, kernel: Kernel) -> None:
        pass  # what it does to memory was known before

    @override
    def copied(self, copy: Copy) -> None:
        read, written = (
            [_place(tensor)] if copy.is_pinned else _places([tensor])
            for tensor in copy.tensors
        )
        with self._lock:
            # Streams may have waited for an earlier copy while the program has not.
            if copy.target is None:
                written_at = {place.address for place in written}
                self._check_checksums(lambda other: other.address in written_at)
            if copy.source is not None and copy.target is not None:
                self.waits_for_stream(copy.source, copy.target)
                self._launch(copy.source, "copy", read, written)
                self.waits_for_stream(copy.target, copy.source)
                return
            work = self._launch(copy.stream, "copy", read, written)
            if copy.blocks:
                self.synchronized_stream(copy.stream)
            else:
                self._keeps_using(copy, work)

    @override
    def made(self, stream: Stream, address: int) -> None:
        with self._lock:
            for work in self._returned.pop(stream, ()):
                if not self._is_before(work, stream):
                    self._reused(stream, work)
            self._memory[address] = memory = _Memory(stream)
            memory.written.put(WHOLE, self._next(stream, "the operator that made it"))

    @override
    def freed(self, address: int) -> None:
        with self._lock:
            memory = self._memory.pop(address, None)
            if memory is None or memory.home is None:
                return
            # The allocator waits for what the streams that `record_stream` named have
            # been given until now, which may be work that waits for another stream.
            waited_for = (memory.home, *memory.guarded)
            for work in memory.all():
                is_guarded = work.stream in memory.guarded
                if not is_guarded and not any(
                    self._is_before(work, stream) for stream in waited_for
                ):
                    # The stream may still wait for that work before it uses the memory
                    # again.
                    self._returned.setdefault(memory.home, []).append(work)

    def end(self) -> None:
        """Ends the record.

        A stream that has never waited for another one was not about to do so.
        """
        with self._lock:
            self._check_checksums(lambda copy: True)
            for home, returned in self._returned.items():
                for work in returned:
                    if not self._is_before(work, home) and not self._clock(home).get(
                        work.stream
                    ):
                        self._reused(home, work)

    @override
    def guarded(self, stream: Stream, tensor: torch.Tensor) -> None:
        with self._lock:
            for place in _places([tensor]):
                self._note(stream, "use", "record_stream")
                if place.address in self._memory:
                    self._memory[place.address].guarded.add(stream)

    @override
    def moment(self, stream: Stream) -> Clock:
        with self._lock:
            self._note(stream, "record", "an event")
            return dict(self._clock(stream))

    @override
    def waits(self, stream: Stream, moment: Clock) -> None:
        with self._lock:
            self._note(stream, "wait", "an event")
            _join(self._clock(stream), moment)

    @override
    def waits_for_stream(self, stream: Stream, other: Stream) -> None:
        with self._lock:
            self._note(stream, "wait", _named(other))
            _join(self._clock(stream), self._clock(other))

    @override
    def synchronized(self, moment: Clock) -> None:
        with self._lock:
            _join(self._host, moment)
            self._check_checksums(self._has_waited_for)

    @override
    def synchronized_stream(self, stream: Stream, why: str = "") -> None:
        with self._lock:
            self._note(stream, "synchronize", "stream")
            _join(self._host, self._clock(stream))
            self._check_checksums(self._has_waited_for)

    @override
    def synchronized_device(self, device: int) -> None:
        with self._lock:
            for stream in [stream for stream in self._clocks if stream[0] == device]:
                self.synchronized_stream(stream)

    @override
    def used_on_cpu(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        with self._lock:
            for tensor in (*read, *written):
                place = _place(tensor)
                memory = self._of_cpu.get(place.address)
                if memory is None:
                    continue
                is_write = any(tensor is other for other in written)
                does = "writes" if is_write else "reads"
                for work in memory.written.within(place.span):
                    self._check_with_program(name, does, work, "writes")
                if is_write:  # torch's own writes are seen, and change the bytes
                    self._check_checksums(functools.partial(_is_at, place.address))
                for work in memory.read_within(place.span) if is_write else ():
                    self._check_with_program(name, does, work, "reads")

    # Of ranks, each has a device of its own, whose streams no other rank uses.

    @override
    def rank_begins(self, rank: int) -> None:
        pass

    @override
    def ranks_end(self) -> None:
        pass

    @override
    def came(self, stream: Stream | None) -> None:
        pass

    @override
    def met(self, meeting: Meeting) -> None:
        pass

    @override
    def received(self, stream: Stream | None, moment: Clock, kind: str) -> None:
        pass

    @override
    def is_over(self, moment: Clock) -> bool:
        return True

    @override
    def is_idle(self, stream: Stream) -> bool:
        return True

    @override
    def seconds_between(self, start: Clock, end: Clock) -> float | None:
        return None

    def _launch(
        self,
        stream: Stream,
        name: str,
        read: Iterable[_Place],
        written: Iterable[_Place],
    ) -> _Work:
        work = self._next(stream, name)
        self._note(stream, "launch", name)
        for place in written:
            self._writes(work, place)
        for place in read:
            self._reads(work, place)
        return work

    def _keeps_using(self, copy: Copy, work: _Work) -> None:
        """Notes that a copy uses pinned memory while the program goes on."""
        tensor = copy.tensors[0 if copy.source is None else 1]
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._under_way.add(copy, work.stream, work.time, work.where)
        if address not in self._of_cpu:
            self._of_cpu[address] = self._memory[address]
            # torch keeps pinned memory until the copies are done, so that is no race;
            # the next tensor is another one.
            weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        with self._lock:
            self._of_cpu.pop(address, None)
            self._memory.pop(address, None)

    def _check_with_program(self, name: str, does: str, work: _Work, did: str) -> None:
        if self._host.get(work.stream, 0) < work.time:
            self._found(
                f"{name}{users_line()}, on the CPU, {does} pinned memory that "
                f"{work.name}{work.where}, on {_named(work.stream)}, {did}, and does "
                "not wait for it: say stream.synchronize(), or event.synchronize() "
                "with an event that was recorded after the copy."
            )

    def _has_waited_for(self, copy: UnderWay) -> bool:
        return self._host.get(copy.stream, 0) >= copy.time

    def _check_checksums(self, is_over: Callable[[UnderWay], bool]) -> None:
        for copy in self._under_way.end(is_over):
            self._found(
                f"Pinned memory that a copy{copy.line}, on {_named(copy.stream)}, "
                f"{copy.does} was written on the CPU before the program has waited for "
                f"the copy; until here{users_line()}, and past torch, as through "
                "NumPy: say stream.synchronize() first, or event.synchronize() with an "
                "event that was recorded after the copy."
            )

    def _clock(self, stream: Stream) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _next(self, stream: Stream, name: str) -> _Work:
        clock = self._clock(stream)
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return _Work(stream, clock[stream], name, users_line())

    def _is_before(self, work: _Work, stream: Stream) -> bool:
        """Whether some work is known to be done before the next work of a stream."""
        return (
            max(self._clock(stream).get(work.stream, 0), self._host.get(work.stream, 0))
            >= work.time
        )

    def _at(self, address: int) -> _Memory:
        """The last uses of some memory.

        Work from before the record began counts as done.
        """
        if address not in self._memory:
            self._memory[address] = _Memory(None)
        return self._memory[address]

    def _reads(self, work: _Work, place: _Place) -> None:
        memory = self._at(place.address)
        self._check_order(work, "reads", memory.written.within(place.span), "wrote")
        # What comes later on this stream is after what it has read before.
        memory.read.setdefault(work.stream, Uses()).put(place.span, work)

    def _writes(self, work: _Work, place: _Place) -> None:
        memory = self._at(place.address)
        self._check_order(work, "writes", memory.written.within(place.span), "wrote")
        self._check_order(work, "writes", memory.read_within(place.span), "reads")
        memory.written.put(place.span, work)
        if place.span == WHOLE:
            memory.read.clear()
        for uses in memory.read.values():
            uses.forget(place.span)

    def _check_order(
        self, work: _Work, does: str, earlier: Iterable[_Work], did: str
    ) -> None:
        """Notes a race with each piece of earlier work that is not known to be done."""
        for other in earlier:
            if not self._is_before(other, work.stream):
                self._race(work, does, other, did)

    def _race(self, work: _Work, does: str, other: _Work, did: str) -> None:
        self._found(
            f"{work.name}{work.where}, on {_named(work.stream)}, {does} a tensor that "
            f"{other.name}{other.where} {did} on {_named(other.stream)}, and does not "
            "wait for it: say stream.wait_stream(other), or stream.wait_event(event) "
            "with an event that was recorded there."
        )

    def _reused(self, home: Stream, work: _Work) -> None:
        self._found(
            f"{_named(home)} gets back memory that {work.name}{work.where}, on "
            f"{_named(work.stream)}, may still be using: say "
            "tensor.record_stream(stream) for a tensor that is used on another stream "
            "than it was made on, or wait before it is freed."
        )

    def _found(self, race: str) -> None:
        if race not in self.races:
            self.races.append(race)

    def _note(self, stream: Stream, what: str, about: str) -> None:
        device, stream_id = stream
        self.events.append(StreamEvent(device, stream_id, what, about))


@contextmanager
def record_streams(check: bool = True) -> Iterator[Recorder]:
    """Records the work on simulated devices' streams, and finds races.

    These races may happen on real devices.

    A consumer does not wait for a copy on a side stream; a tensor is freed while
    another stream may still read it, because nobody called `record_stream`; a buffer is
    filled again too early: on a GPU these mistakes give wrong numbers now and then.
    Simulated devices do all work at once and compute the right numbers. The recorder
    finds the mistakes all the same, since it looks at which stream waits for which.

    Pinned memory of the CPU counts, too: a staging buffer that is filled again while a
    copy of it is under way, or a result of `.to("cpu", non_blocking=True)` that is read
    before the program has waited. Writes that torch does not see, as those of NumPy,
    are seen when the program waits.

    It records all threads of the process; what the program itself does with pinned
    memory, on the thread of the block and on those of a strategy's replicas. Work on
    two parts of one storage is no race: what counts are the bytes from the first
    element of a tensor to its last. Work from before the block counts as done. If the
    program waits on the CPU (`synchronize()`, `.item()`, a blocking copy), that counts
    for all threads.

    Args:
        check: Whether races are an error when the block ends; if not, they are only in
            the record.

    Yields:
        A record: `events`, as (device, stream, what, about), and `races`, each in
        words.

    Raises:
        AssertionError: At the end of the block, if there were races.
        RuntimeError: If a recorder is at work already.

    Example:
        >>> with torchstrategy.testing.record_streams() as record:
        ...     pass  # tensors on "sim:0", streams of torch.sim
        >>> record.races
        []
    """
    if any(isinstance(listener, Recorder) for listener in listeners()):
        raise RuntimeError(
            "record_streams() is at work already, and records all threads: leave that "
            "block first."
        )
    made = Recorder()
    with listening(made), watching_the_cpu():
        yield made
        made.end()
    check_races(made, check)


def _places(tensors: Iterable[torch.Tensor]) -> list[_Place]:
    """The memory of those tensors that are on simulated devices."""
    on_devices = (
        tensor
        for tensor in tensors
        if is_simulated(tensor) and tensor.layout is torch.strided
    )
    return [place for place in map(_place, on_devices) if place.address]


def _place(tensor: torch.Tensor) -> _Place:
    """The memory of a tensor; if it has gaps, they count as used."""
    storage = tensor.untyped_storage()
    address, in_all = storage.data_ptr(), storage.nbytes()
    # Most tensors are so; in an expanded one, many elements share a part.
    if tensor.nbytes >= in_all and tensor.is_contiguous():
        return _Place(address, WHOLE)
    span = Span(*extent(tensor))
    return _Place(address, WHOLE if span == (0, in_all) else span)


def check_races(record: Recorder, check: bool = True) -> None:
    """Raises an AssertionError with the races of a record, if it is to `check` them."""
    if check and record.races:
        raise AssertionError(
            "\n- ".join(["On real devices this may go wrong:", *record.races])
        )


def _is_at(address: int, copy: UnderWay) -> bool:
    return copy.address == address


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _named(stream: Stream) -> str:
    device, number = stream
    return (
        f"stream {number} of sim:{device}"
        if number
        else f"the default stream of sim:{device}"
    )
