"""Streams and events of simulated devices.

All work is done at once, so streams and events only have an identity. They tell whoever
listens which stream waits for which.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from torchstrategy.testing._simulation.facades import put_in_place
from torchstrategy.testing._simulation.listeners import (
    Copy,
    Kernel,
    Launch,
    Listener,
    listeners,
    listeners_to_launches,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    DeviceError,
    Spoken,
    current_device,
    index_of,
    ordinal,
    set_device,
)
from torchstrategy.testing._simulation.pinned import is_pinned
from torchstrategy.testing._simulation.sync_debug import check_wait, get_sync_debug_mode
from torchstrategy.testing._simulation.torch_internals import PRIVATEUSE1_ID

_ids = itertools.count(1)
_HIGHEST = -3  # of the priorities of streams that torch has on GPUs
# The objects for the default streams, by thread and device. torch makes one at each
# call, which no two threads share.
_defaults: dict[tuple[int, int], Stream] = {}


@final
class _Here(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}  # by device: its current stream
        self.is_capturing = False
        self.lost: str | None = None  # why the capture cannot succeed any more


_here = _Here()


_Plain = torch.Stream  # the original: `install` puts another one in its place


class Stream(_Plain):
    """A stream of a simulated device.

    Work that is put on it is done when the call returns.
    """

    # The device and stream from before each open `with stream:` block. As in torch,
    # they are in the object, and not in the thread: if two threads enter one object at
    # once, one of them gets the device and stream of the other.
    _before: list[tuple[int, Stream]]
    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
        """A new stream, or an existing one that is named as in `torch.Stream`.

        `stream_id`, `device_index` and `device_type` name it.
        """
        index = identity.get("device_index")
        made: Stream = super().__new__(
            cls,
            stream_id=next(_ids)
            if identity.get("stream_id") is None
            else identity["stream_id"],
            device_index=ordinal(device) if index is None else index,
            device_type=PRIVATEUSE1_ID,
        )
        made._before = []
        made.priority = min(max(priority, _HIGHEST), 0)
        return made

    def synchronize(self) -> None:
        """Returns at once: nothing is under way."""
        refuse_in_capture("stream.synchronize() waits for the device")
        check_wait()
        for listener in listeners():
            listener.synchronized_stream(_key(self), "stream.synchronize()")

    def wait_stream(self, stream: torch.Stream) -> None:
        """Returns at once: nothing is under way."""
        for listener in listeners():
            if stream.device.type == NAME:
                listener.waits_for_stream(_key(self), _key(stream))

    def wait_event(self, event: Any) -> None:
        """Returns at once: what was recorded has happened."""
        event.wait(self)

    def query(self) -> bool:
        """Whether all work is done: always, but in a block of `virtual_time`."""
        refuse_in_capture("stream.query() asks the device")
        return all(listener.is_idle(_key(self)) for listener in listeners())

    def is_capturing(self) -> bool:
        """Whether work is recorded as a graph. Optimizers ask this."""
        return _here.is_capturing

    @property
    def cuda_stream(self) -> int:
        """What `torch.cuda.Stream` has as the address of the driver's stream.

        It is 0 for the default stream.
        """
        return self.stream_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority. They have no effect."""
        return 0, _HIGHEST

    def record_event(self, event: Any = None) -> Any:
        """Records an event, a new one unless one is given, and returns it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append((current_device(), current_stream(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        device, stream = self._before.pop()
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
        external: Accepted as on GPUs; it is about graphs.
    """

    def __new__(cls, *args: Any, **options: Any) -> Event:
        made: Event = super().__new__(cls, device=torch.device(NAME))
        return made

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._enable_timing = enable_timing
        self._device: torch.device | None = None
        self._at: float | None = None  # seconds
        # The moments for those that listened when the event was recorded.
        self._moments: dict[Listener, Any] = {}

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """The device on which it was recorded; None if it was not."""
        return self._device

    @property
    def cuda_event(self) -> int:
        """What `torch.cuda.Event` has as the address of the driver's event.

        It is 0 before the event is recorded.
        """
        return 0 if self._at is None else id(self)

    def __repr__(self) -> str:
        return (
            f"<torch.{Spoken.name}.Event "
            f"{'uninitialized' if self._at is None else hex(self.cuda_event)}>"
        )

    def record(self, stream: torch.Stream | None = None) -> None:
        """Notes that the event happened now.

        Raises:
            RuntimeError: If it is given something else than a stream.
        """
        if stream is not None and not isinstance(stream, _Plain):
            raise RuntimeError(
                "expected stream to be a torch.Stream or torch.cuda.Stream object"
            )
        self._device = torch.device(
            NAME, current_device() if stream is None else stream.device_index
        )
        self._at = time.perf_counter()
        self._moments = {
            listener: listener.moment(_key(stream)) for listener in listeners()
        }

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Returns at once: what was recorded has happened."""
        for listener, moment in self._noted():
            listener.waits(_key(stream), moment)

    def synchronize(self) -> None:
        """Returns at once: what was recorded has happened."""
        refuse_in_capture("event.synchronize() waits for the device")
        for listener, moment in self._noted():
            listener.synchronized(moment)

    def query(self) -> bool:
        """Whether it has happened: always, but in a block of `virtual_time`."""
        refuse_in_capture("event.query() asks the device")
        return all(listener.is_over(moment) for listener, moment in self._noted())

    def elapsed_time(self, end: Event) -> float:  # type: ignore[override]
        """The milliseconds from this event to another one.

        Raises:
            ValueError: If one of them was made without `enable_timing=True`, or was not
                recorded.
        """
        if not (self._enable_timing and end._enable_timing):
            raise ValueError(
                "Both events must be created with argument 'enable_timing=True'."
            )
        if self._at is None or end._at is None:
            raise ValueError(
                "Both events must be recorded before calculating elapsed time."
            )
        for listener, moment in self._moments.items():
            if listener in end._moments:
                seconds = listener.seconds_between(moment, end._moments[listener])
                if seconds is not None:
                    return seconds * 1e3
        return (end._at - self._at) * 1e3

    def _noted(self) -> list[tuple[Listener, Any]]:
        """What the listeners that are at work noted when it was recorded."""
        return [
            (listener, self._moments[listener])
            for listener in listeners()
            if listener in self._moments
        ]


@final
class stream:
    """A block in which a stream is the current one of its device.

    Its device is the current one, too. None changes nothing.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        # In this object, so that several threads may enter one stream, each with a
        # block of its own.
        self._before: list[tuple[int, Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append(
                (current_device(), current_stream(self.stream.device_index))
            )
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            device, before = self._before.pop()
            set_stream(before)
            set_device(device)


def default_stream(device: torch.device | str | int | None = None) -> Stream:
    """The stream of a device that is current if no other was chosen."""
    here = threading.get_ident(), ordinal(device)
    if here not in _defaults:
        _defaults[here] = Stream(device_index=here[1], stream_id=0)
    return _defaults[here]


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    """This thread's current stream of a device."""
    index = ordinal(device)
    return _here.streams.get(index) or default_stream(index)


def set_capturing(is_capturing: bool) -> None:
    """Says whether this thread's work is recorded as a graph."""
    _here.is_capturing, _here.lost = is_capturing, None


def why_capture_is_lost() -> str | None:
    """Why the graph that is recorded now cannot be had any more; None if it can."""
    return _here.lost


def refuse_in_capture(what: str) -> None:
    """Refuses a call that CUDA does not allow while a graph is recorded.

    The graph records the work of this thread, and is lost then.
    """
    if _here.is_capturing:
        _here.lost = (
            f"operation not permitted when stream is capturing: {what} while a CUDA "
            "graph is captured, and a graph cannot wait for the CPU. Do it before the "
            "capture, or after a replay."
        )
        raise DeviceError(f"CUDA error: {_here.lost}")


def set_stream(stream: Stream | None) -> None:
    """Makes a stream this thread's current one of its device.

    Its device becomes the current one, too. None changes nothing.
    """
    if stream is None:
        return
    _here.streams[stream.device_index] = stream
    set_device(stream.device_index)


def _key(stream: torch.Stream | None) -> tuple[int, int]:
    return (
        identity_of_current_stream()
        if stream is None
        else (stream.device_index, stream.stream_id)
    )


# What listeners are told besides. These functions do nothing while nobody listens.


def launched(
    name: str,
    device: int,
    read: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> None:
    """Says that an operator is about to run on the current stream of a device."""
    launch = Launch(identity_of_current_stream(device), name, read, written)
    for listener in listeners_to_launches():
        listener.launched(launch)


def computed(
    operator: Any,
    device: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Any,
) -> None:
    """Says that an operator has run on the current stream of a device.

    Its tensors come as the CPU sees them.
    """
    kernel = Kernel(identity_of_current_stream(device), operator, args, kwargs, results)
    for listener in listeners():
        listener.computed(kernel)


def read_by_the_program(device: int, operator: str) -> None:
    """Says that the program waited for a device's current stream to see a number."""
    check_wait()
    for listener in listeners():
        listener.synchronized_stream(identity_of_current_stream(device), operator)


def copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Says that a tensor is about to be copied.

    Between two devices, both streams wait for each other. From and to the CPU the
    program waits, unless the copy is `non_blocking` and the memory of the CPU is
    pinned: CUDA's copies from and to other memory return when that is read or written.
    """
    if (
        not non_blocking
        and get_sync_debug_mode()
        and (index_of(source) is None) != (index_of(target) is None)
    ):
        check_wait()
    if not listeners():
        return
    here, there = index_of(source), index_of(target)
    from_or_to_cpu = here is None or there is None
    pinned = from_or_to_cpu and is_pinned(source if here is None else target)
    copy = Copy(
        source=None if here is None else identity_of_current_stream(here),
        target=None if there is None else identity_of_current_stream(there),
        tensors=(source, target),
        is_pinned=pinned,
        blocks=from_or_to_cpu and not (non_blocking and pinned),
    )
    for listener in listeners():
        listener.copied(copy)


def identity_of_current_stream(device: int | None = None) -> tuple[int, int]:
    """This thread's current stream of a device, as listeners know it.

    Without a device, it is the stream of the current device.
    """
    index = ordinal(device)
    stream = _here.streams.get(index)
    return index, 0 if stream is None else stream.stream_id


def guarded(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Says that `tensor.record_stream(stream)` was called."""
    for listener in listeners():
        listener.guarded(_key(stream), tensor)


def made(index: int, address: int) -> None:
    """Says that memory was taken for the current stream of a device."""
    for listener in listeners():
        listener.made(identity_of_current_stream(index), address)


def freed(address: int) -> None:
    """Says that memory was given back."""
    for listener in listeners():
        listener.freed(address)


# The names that torch has for streams and events.


def install() -> None:
    """Lets `torch.Stream(device="sim:1")` make a stream of a simulated device.

    `torch.Event(device="sim:1")` makes an event of it.
    """
    put_in_place("Stream", _stream)
    put_in_place("Event", _event)


def _stream(original: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device", args[0] if args else None)
    return Stream(device) if _is_simulated(device) else original(*args, **kwargs)


def _event(original: Any, device: Any = None, **kwargs: Any) -> Any:
    return (
        Event(**kwargs)
        if device is None or _is_simulated(device)
        else original(device, **kwargs)
    )


def _is_simulated(device: Any) -> bool:
    """Whether `device` means a simulated device.

    An int is an index of the accelerator, which is simulated.
    """
    return isinstance(device, int) or (
        device is not None and torch.device(device).type == NAME
    )
