"""Which streams of accelerators are current on a thread, and how a block sets them.

The library never enters a stream object, as in `with stream:`. torch keeps what was
current before in that object. If several threads have entered one object, the first
that leaves gets the stream and the device of the last that entered; torch 2.10 raises
an error instead. The functions here keep what was before on the stack of their thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from torchstrategy._base.torch_internals import sparse_indices, sparse_values
from torchstrategy._base.types import Device

Streams = Mapping[Device, torch.Stream]  # by device


def current_streams(devices: Iterable[Device]) -> dict[Device, torch.Stream]:
    """This thread's current stream of each of some devices. CPUs have none."""
    accelerators = dict.fromkeys(device for device in devices if device.type != "cpu")
    return {device: torch.accelerator.current_stream(device) for device in accelerators}


def begin_using(device: Device) -> None:
    """Makes an accelerator the current one of this thread, which may have used none.

    `torch.accelerator.set_device_index` does nothing on a new thread if it is given
    device 0, which is the current one. Then the thread has no CUDA context, and torch
    warns of that at the thread's first product of matrices.
    """
    set_device = getattr(
        torch.get_device_module(device),
        "set_device",
        torch.accelerator.set_device_index,
    )
    set_device(device)


def make_current(streams: Iterable[torch.Stream]) -> None:
    """Makes streams the current ones of their devices on this thread.

    Its current device stays.
    """
    index = torch.accelerator.current_device_index()
    for stream in streams:
        # This also makes the stream's device the current one.
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """A block that works on a stream: the stream is current, and so is its device."""
    index, before = (
        torch.accelerator.current_device_index(),
        torch.accelerator.current_stream(stream.device),
    )
    try:
        # This also makes the stream's device the current one.
        torch.accelerator.set_stream(stream)
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


@contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """A block in which several devices have other current streams.

    The current device stays.
    """
    before = current_streams(streams)
    try:
        make_current(streams.values())
        yield
    finally:
        make_current(before.values())


def keep_until_used(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Keeps the memory of a dropped tensor until a stream has done its work.

    Until the stream has done what it was given, no other tensor gets the memory.
    """
    for part in memory_of(tensor):
        part.record_stream(stream)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors with a tensor's memory: the parts of a sparse or nested one."""
    if tensor.is_nested:
        parts = (tensor.values(), tensor.offsets(), tensor.lengths())  # type: ignore[attr-defined]
        return [part for part in parts if part is not None]
    if tensor.layout is torch.sparse_coo:
        return [sparse_indices(tensor), sparse_values(tensor)]
    return [tensor]
