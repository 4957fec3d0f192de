"""Streams and events of simulated devices.

All work is done at once, so streams and events only have an identity. They tell a recorder, if there is one, which
stream waits for which.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any, final

import torch

from torchstrategy.testing._simulation.facades import put_in_place
from torchstrategy.testing._simulation.ordinals import NAME, current_device, index_of, ordinal, set_device
from torchstrategy.testing._simulation.recorder import Clock, recorder
from torchstrategy.testing._simulation.torch_internals import PRIVATEUSE1_ID

_ids = itertools.count(1)
_defaults: dict[int, Stream] = {}


@final
class _Here(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}  # by device: its current stream
        self.before: list[tuple[int, Stream]] = []  # the device and stream from before each open `with stream:` block


_here = _Here()


class Stream(torch.Stream):  # the original: `install` puts another one in its place
    """A stream of a simulated device. Work that is put on it is done when the call returns."""

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
        """A new stream; `stream_id`, `device_index` and `device_type` name an existing one, as `torch.Stream` does."""
        index = identity.get("device_index")
        made: Stream = super().__new__(
            cls,
            stream_id=next(_ids) if identity.get("stream_id") is None else identity["stream_id"],
            device_index=ordinal(device) if index is None else index,
            device_type=PRIVATEUSE1_ID,
        )
        return made

    def synchronize(self) -> None:
        """Returns at once: nothing is under way."""
        if (record := recorder()) is not None:
            record.synchronize_stream(_key(self))

    def wait_stream(self, stream: torch.Stream) -> None:
        """Returns at once: nothing is under way."""
        if (record := recorder()) is not None and stream.device.type == NAME:
            record.wait_for_stream(_key(self), _key(stream))

    def wait_event(self, event: Any) -> None:
        """Returns at once: what was recorded has happened."""
        event.wait(self)

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether work is recorded as a graph: never. Optimizers ask this."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Records an event, a new one unless one is given, and returns it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _here.before.append((current_device(), current_stream(self.device_index)))
        set_device(self.device_index)
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        device, stream = _here.before.pop()
        set_stream(stream)
        set_device(device)

    def __repr__(self) -> str:
        return f"<torch.{NAME}.Stream device={self.device} id={self.stream_id}>"


class Event(torch.Event):
    """An event on a stream. Once recorded it has happened.

    Args:
        enable_timing: Whether `elapsed_time` may be asked.
        blocking: Accepted as on accelerators; nothing is ever waited for.
        interprocess: Accepted as on accelerators; nothing is ever waited for.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made: Event = super().__new__(cls, device=torch.device(NAME))
        return made

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._enable_timing = enable_timing
        self._at: float | None = None  # seconds
        self._moment: Clock | None = None  # for a recorder

    def record(self, stream: torch.Stream | None = None) -> None:
        """Notes that the event happened now."""
        self._at = time.perf_counter()
        if (record := recorder()) is not None:
            self._moment = record.moment(_key(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Returns at once: what was recorded has happened."""
        if (record := recorder()) is not None and self._moment is not None:
            record.wait(_key(stream), self._moment, "an event")

    def synchronize(self) -> None:
        """Returns at once: what was recorded has happened."""
        if (record := recorder()) is not None and self._moment is not None:
            record.synchronize(self._moment)

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True

    def elapsed_time(self, end: Event) -> float:  # type: ignore[override]
        """The milliseconds from this event to another one.

        Raises:
            RuntimeError: If one of them was made without `enable_timing=True`, or was not recorded.
        """
        if not (self._enable_timing and end._enable_timing):
            raise RuntimeError("elapsed_time needs both events to be made with enable_timing=True.")
        if self._at is None or end._at is None:
            raise RuntimeError("elapsed_time needs both events to be recorded first.")
        return (end._at - self._at) * 1e3


@final
class stream:
    """A block in which a stream is the current one of its device, and that device the current one. None: no change."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def default_stream(device: torch.device | str | int | None = None) -> Stream:
    """The stream of a device that is current if no other was chosen."""
    index = ordinal(device)
    if index not in _defaults:
        _defaults[index] = Stream(device_index=index, stream_id=0)
    return _defaults[index]


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    """This thread's current stream of a device."""
    index = ordinal(device)
    return _here.streams.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    """Makes a stream this thread's current one of its device."""
    _here.streams[stream.device_index] = stream


def _key(stream: torch.Stream | None) -> tuple[int, int]:
    stream = current_stream() if stream is None else stream
    return stream.device_index, stream.stream_id


# What the recorder is told besides. These functions do nothing while there is none.


def launched(name: str, device: int, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
    """Says that an operator was put on the current stream of a device."""
    if (record := recorder()) is not None:
        record.launch(_key(current_stream(device)), name, _addresses(read), _addresses(written))


def read_by_the_program(device: int) -> None:
    """Says that the program has waited for the current stream of a device, to see a number."""
    if (record := recorder()) is not None:
        record.synchronize_stream(_key(current_stream(device)))


def copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Says that a tensor was copied: on the current stream of the source's device, or of the target's from the CPU.

    Between two devices, both streams wait for each other. From and to the CPU the program waits, unless the copy is
    `non_blocking`.
    """
    record = recorder()
    if record is None:
        return
    here, there = index_of(source), index_of(target)
    streams = [_key(current_stream(index)) for index in (here, there) if index is not None]
    if here is not None and there is not None:
        record.wait_for_stream(streams[0], streams[1])
    record.launch(streams[0], "copy", _addresses([source]), _addresses([target]))
    if here is not None and there is not None:
        record.wait_for_stream(streams[1], streams[0])
    elif not non_blocking:
        record.synchronize_stream(streams[0])


def guarded(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Says that `tensor.record_stream(stream)` was called."""
    if (record := recorder()) is not None:
        for address in _addresses([tensor]):
            record.guard(_key(stream), address)


def made(index: int, address: int) -> None:
    """Says that memory was taken for the current stream of a device."""
    if (record := recorder()) is not None:
        record.made(_key(current_stream(index)), address)


def freed(address: int) -> None:
    """Says that memory was given back."""
    if (record := recorder()) is not None:
        record.freed(address)


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    on_devices = [tensor for tensor in tensors if index_of(tensor) is not None and tensor.layout is torch.strided]
    return [address for address in (tensor.untyped_storage().data_ptr() for tensor in on_devices) if address]


# The names that torch has for streams and events.


def install() -> None:
    """Lets `torch.Stream(device="sim:1")` and `torch.Event(device="sim:1")` make those of simulated devices."""
    put_in_place("Stream", _stream)
    put_in_place("Event", _event)


def _stream(original: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device", args[0] if args else None)
    return Stream(device) if _is_simulated(device) else original(*args, **kwargs)


def _event(original: Any, device: Any = None, **kwargs: Any) -> Any:
    return Event(**kwargs) if device is None or _is_simulated(device) else original(device, **kwargs)


def _is_simulated(device: Any) -> bool:
    """Whether `device` means a simulated device. An int is an index of the accelerator, which is simulated."""
    return isinstance(device, int) or (device is not None and torch.device(device).type == NAME)
