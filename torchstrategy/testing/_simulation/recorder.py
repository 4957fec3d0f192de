"""Records the work on the streams of simulated devices, and finds races between streams.

Simulated devices do all work at once. On a real device a stream does its work some time later, and the work of two
streams is ordered only where one waits for the other. For each stream, the recorder keeps a vector clock: how much of
every stream's work is known to be done before the next work of this stream. If work uses memory that another stream
uses, and the order of the two is not known, that is a race.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, final

Stream = tuple[int, int]
"""A stream: the index of its device, and its id there; 0 is the default stream."""

Clock = dict[Stream, int]
"""For each stream, how many of its pieces of work are done."""

_PACKAGE = str(Path(__file__).parents[2])
_recorders: list[Recorder] = []  # at most one


class StreamEvent(NamedTuple):
    """Something that happened on a stream: `what` is `"launch"`, `"wait"`, `"record"`, `"synchronize"` or `"use"`."""

    device: int
    stream: int
    what: str
    about: str


class _Work(NamedTuple):
    stream: Stream
    time: int
    name: str
    where: str


@final
class _Memory:
    """The last uses of a piece of memory, for which its next use may have to wait."""

    def __init__(self, home: Stream | None, written: _Work) -> None:
        # The stream that may reuse the memory when it is free. None: it was allocated before the record began.
        self.home = home
        self.written = written
        self.read: dict[Stream, _Work] = {}
        self.guarded: set[Stream] = set()  # the streams that `record_stream` named


@final
class Recorder:
    """A record of the work on streams. Threads may share it.

    Attributes:
        events: The events, in order.
        races: The races that may happen on a real device, in words; each once.
    """

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        self.races: list[str] = []
        self._clocks: dict[Stream, Clock] = {}
        self._host: Clock = {}  # how much of every stream's work the program has waited for
        self._memory: dict[int, _Memory] = {}
        self._lock = threading.RLock()  # memory may be freed, and say so, while this thread holds the lock

    def launch(self, stream: Stream, name: str, read: Iterable[int], written: Iterable[int]) -> None:
        """Notes that a piece of work is put on a stream.

        Args:
            stream: The stream.
            name: What the work is.
            read: The memory that it reads, by address.
            written: The memory that it writes, by address.
        """
        with self._lock:
            work = self._next(stream, name)
            self._note(stream, "launch", name)
            for address in written:
                self._writes(work, address)
            for address in read:
                self._reads(work, address)

    def made(self, stream: Stream, address: int) -> None:
        """Notes that memory was allocated for the work that was put on a stream last."""
        with self._lock:
            self._memory[address] = _Memory(stream, self._next(stream, "the operator that made it"))

    def freed(self, address: int) -> None:
        """Notes that memory is free: the next tensor of the stream for which it was allocated may get it."""
        with self._lock:
            memory = self._memory.pop(address, None)
            if memory is None or memory.home is None:
                return
            for work in (memory.written, *memory.read.values()):
                if work.stream not in memory.guarded and not self._is_before(work, memory.home):
                    self._found(
                        f"{_named(memory.home)} gets back memory that {work.name}{work.where}, on "
                        f"{_named(work.stream)}, may still be using: say tensor.record_stream(stream) for a tensor "
                        "that is used on another stream than it was made on, or wait before it is freed."
                    )

    def guard(self, stream: Stream, address: int) -> None:
        """Notes `tensor.record_stream(stream)`: the memory is not reused before the work on that stream is done."""
        with self._lock:
            self._note(stream, "use", "record_stream")
            if address in self._memory:
                self._memory[address].guarded.add(stream)

    def moment(self, stream: Stream, about: str = "an event") -> Clock:
        """The clock of the moment at which all work that is now on a stream is done."""
        with self._lock:
            self._note(stream, "record", about)
            return dict(self._clock(stream))

    def wait(self, stream: Stream, moment: Clock, about: str) -> None:
        """Notes that work which is put on a stream from here on waits for a moment."""
        with self._lock:
            self._note(stream, "wait", about)
            _join(self._clock(stream), moment)

    def wait_for_stream(self, stream: Stream, other: Stream) -> None:
        """Notes that work which is put on a stream from here on waits for all work that is now on another one."""
        with self._lock:
            self._note(stream, "wait", _named(other))
            _join(self._clock(stream), self._clock(other))

    def synchronize(self, moment: Clock) -> None:
        """Notes that the program itself waits for a moment, and so everything that it does later."""
        with self._lock:
            _join(self._host, moment)

    def synchronize_stream(self, stream: Stream) -> None:
        """Notes that the program itself waits for all work that is now on a stream."""
        with self._lock:
            self._note(stream, "synchronize", "stream")
            _join(self._host, self._clock(stream))

    def synchronize_device(self, device: int) -> None:
        """Notes that the program itself waits for all work that is now on any stream of a device."""
        with self._lock:
            for stream in [stream for stream in self._clocks if stream[0] == device]:
                self.synchronize_stream(stream)

    def _clock(self, stream: Stream) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _next(self, stream: Stream, name: str) -> _Work:
        clock = self._clock(stream)
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return _Work(stream, clock[stream], name, _users_line())

    def _is_before(self, work: _Work, stream: Stream) -> bool:
        """Whether a piece of work is known to be done before the next work of a stream."""
        return max(self._clock(stream).get(work.stream, 0), self._host.get(work.stream, 0)) >= work.time

    def _at(self, address: int, stream: Stream) -> _Memory:
        """The last uses of some memory. Work from before the record began counts as done."""
        if address not in self._memory:
            self._memory[address] = _Memory(None, _Work(stream, 0, "", ""))
        return self._memory[address]

    def _reads(self, work: _Work, address: int) -> None:
        memory = self._at(address, work.stream)
        if not self._is_before(memory.written, work.stream):
            self._race(work, "reads", memory.written, "wrote")
        memory.read[work.stream] = work

    def _writes(self, work: _Work, address: int) -> None:
        memory = self._at(address, work.stream)
        if not self._is_before(memory.written, work.stream):
            self._race(work, "writes", memory.written, "wrote")
        for other in memory.read.values():
            if not self._is_before(other, work.stream):
                self._race(work, "writes", other, "reads")
        memory.written = work
        memory.read.clear()

    def _race(self, work: _Work, does: str, other: _Work, did: str) -> None:
        self._found(
            f"{work.name}{work.where}, on {_named(work.stream)}, {does} a tensor that {other.name}{other.where} {did} "
            f"on {_named(other.stream)}, and does not wait for it: say stream.wait_stream(other), or stream.wait_event("
            "event) with an event that was recorded there."
        )

    def _found(self, race: str) -> None:
        if race not in self.races:
            self.races.append(race)

    def _note(self, stream: Stream, what: str, about: str) -> None:
        self.events.append(StreamEvent(*stream, what, about))


def recorder() -> Recorder | None:
    """The recorder that is at work; None if none is."""
    return _recorders[-1] if _recorders else None


@contextmanager
def record_streams(check: bool = True) -> Iterator[Recorder]:
    """Records the work on the streams of simulated devices, and finds races that may happen on real ones.

    A consumer does not wait for a copy on a side stream; a tensor is freed while another stream may still read it,
    because nobody called `record_stream`; a buffer is filled again too early: on a GPU these mistakes give wrong
    numbers now and then. Simulated devices do all work at once and compute the right numbers. The recorder finds the
    mistakes all the same, since it looks at which stream waits for which.

    It records all threads of the process. Memory is distinguished by storage: work on two parts of one storage counts
    as work on the same memory. Work from before the block counts as done. If the program waits on the CPU
    (`synchronize()`, `.item()`, a blocking copy), that counts for all threads.

    Args:
        check: Whether races are an error when the block ends; if not, they are only in the record.

    Yields:
        A record: `events`, as (device, stream, what, about), and `races`, each in words.

    Raises:
        AssertionError: At the end of the block, if there were races.
        RuntimeError: If a recorder is at work already.

    Example:
        >>> with torchstrategy.testing.record_streams() as record:
        ...     pass  # tensors on "sim:0", streams of torch.sim
        >>> record.races
        []
    """
    if _recorders:
        raise RuntimeError("record_streams() is at work already, and records all threads: leave that block first.")
    made = Recorder()
    _recorders.append(made)
    try:
        yield made
    finally:
        _recorders.remove(made)
    if check and made.races:
        raise AssertionError("\n- ".join(["On real devices this may go wrong:", *made.races]))


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _named(stream: Stream) -> str:
    device, number = stream
    return f"stream {number} of sim:{device}" if number else f"the default stream of sim:{device}"


def _users_line() -> str:
    """The innermost line of the stack that is neither torch's nor this package's: ` (train.py:12)`."""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and "/torch/" not in file and not file.startswith("<"):
            return f" ({Path(file).name}:{line})"
    return ""
