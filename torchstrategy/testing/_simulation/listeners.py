"""What happens on the streams of simulated devices, told to whoever listens.

Simulated devices do all work at once. A `Listener` is told what a real device would be
asked to do and when somebody waits, so that it can say what a real device might do with
it: `recorder` finds races, and `clock` keeps the time. Several may listen at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Stream = tuple[int, int]
"""A stream: the index of its device, and its id there; 0 is the default stream."""


class Launch(NamedTuple):
    """An operator that is put on a stream."""

    stream: Stream
    name: str
    read: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]


class Kernel(NamedTuple):
    """An operator that has run, with its arguments and results as the CPU sees them."""

    stream: Stream
    operator: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Any


class Copy(NamedTuple):
    """A copy between two devices, within one, or from or to the CPU."""

    source: Stream | None  # the current stream of the device; None: the CPU
    target: Stream | None
    tensors: tuple[torch.Tensor, torch.Tensor]  # of the source and of the target
    # Whether the CPU's memory is pinned; False if the CPU has no part in the copy.
    is_pinned: bool
    blocks: bool  # whether the program waits until the copy is done

    @property
    def stream(self) -> Stream:
        """The stream on which the copy is done.

        This is the stream of the source, or of the target if the source is on the CPU.
        """
        stream = self.target if self.source is None else self.source
        assert stream is not None
        return stream


class Arrival(NamedTuple):
    """A rank has come to a collective."""

    # The current stream of the device whose tensors it brings; None: they are on the
    # CPU.
    stream: Stream | None
    moment: Any  # what `Listener.came` returned
    where: str  # the line of the program


class Meeting(NamedTuple):
    """A collective to which all ranks have come, or a message between two ranks.

    A message goes from the first rank to the second.
    """

    kind: str
    bytes: int  # of the whole: `Collective.bytes`
    arrivals: Sequence[Arrival]  # of each rank


class Listener(ABC):
    """Is told what happens.

    Threads may share it; the methods may be called while memory is freed, anywhere.
    """

    looks_at_launches = True  # whether it is told of operators before they run

    @abstractmethod
    def launched(self, launch: Launch) -> None:
        """An operator is about to run."""

    @abstractmethod
    def computed(self, kernel: Kernel) -> None:
        """An operator has run."""

    @abstractmethod
    def copied(self, copy: Copy) -> None:
        """A tensor is about to be copied."""

    @abstractmethod
    def made(self, stream: Stream, address: int) -> None:
        """Memory was allocated for the work that was put on a stream last."""

    @abstractmethod
    def freed(self, address: int) -> None:
        """Memory is free: the next tensor of its stream may get it.

        The stream is the one for which the memory was allocated.
        """

    @abstractmethod
    def guarded(self, stream: Stream, tensor: torch.Tensor) -> None:
        """The program has called `tensor.record_stream(stream)`.

        The memory is not used again before the work on that stream is done.
        """

    @abstractmethod
    def moment(self, stream: Stream) -> Any:
        """The moment at which all work that is now on a stream is done.

        Each listener notes a moment in its own way.
        """

    @abstractmethod
    def waits(self, stream: Stream, moment: Any) -> None:
        """Work which is put on a stream from here on waits for a moment."""

    @abstractmethod
    def waits_for_stream(self, stream: Stream, other: Stream) -> None:
        """New work on a stream waits for the work that is now on another stream.

        It waits until all of that work is done.
        """

    @abstractmethod
    def synchronized(self, moment: Any) -> None:
        """The program itself waits for a moment, and so does all that it does later."""

    @abstractmethod
    def synchronized_stream(self, stream: Stream, why: str) -> None:
        """The program itself waits for all work that is now on a stream."""

    @abstractmethod
    def synchronized_device(self, device: int) -> None:
        """The program itself waits for all work now on any stream of a device."""

    @abstractmethod
    def used_on_cpu(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """An operator of the CPU is about to use memory of the CPU."""

    @abstractmethod
    def rank_begins(self, rank: int) -> None:
        """This thread is a rank of a run from here on: a process of its own."""

    @abstractmethod
    def ranks_end(self) -> None:
        """All ranks of a run have ended."""

    @abstractmethod
    def came(self, stream: Stream | None) -> Any:
        """A rank calls a collective.

        Returns the moment at which what it brings is there.
        """

    @abstractmethod
    def met(self, meeting: Meeting) -> Any:
        """All ranks have come to a collective.

        Returns the moment at which each has what it gets.
        """

    @abstractmethod
    def received(self, stream: Stream | None, moment: Any, kind: str) -> None:
        """A rank waits for what a collective of a `kind` brings.

        Its stream waits. If the stream is None, the program waits.
        """

    @abstractmethod
    def is_over(self, moment: Any) -> bool:
        """Whether a moment has come."""

    @abstractmethod
    def is_idle(self, stream: Stream) -> bool:
        """Whether all work on a stream is done."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float | None:
        """The seconds between two moments; None if this listener keeps no time."""


_at_work: tuple[Listener, ...] = ()
_at_launches: tuple[Listener, ...] = ()


def listeners() -> tuple[Listener, ...]:
    """Those that are at work."""
    return _at_work


def listeners_to_launches() -> tuple[Listener, ...]:
    """Those that are told of operators before they run."""
    return _at_launches


def _exchange(now: tuple[Listener, ...]) -> None:
    global _at_work, _at_launches
    _at_work, _at_launches = (
        now,
        tuple(listener for listener in now if listener.looks_at_launches),
    )


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A block in which a listener hears what happens on all threads."""
    _exchange((*_at_work, listener))
    try:
        yield
    finally:
        _exchange(tuple(other for other in _at_work if other is not listener))


@contextmanager
def nobody_listening() -> Iterator[None]:
    """A block of which no listener is told: what it does, no device would do."""
    before = _at_work
    _exchange(())
    try:
        yield
    finally:
        _exchange(before)
