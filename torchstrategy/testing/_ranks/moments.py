"""When ranks come to a collective, and when they have what they get.

Each listener notes these moments in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from torchstrategy.testing._simulation.listeners import (
    Arrival,
    Listener,
    Meeting,
    Stream,
    listeners,
)
from torchstrategy.testing._simulation.ordinals import (
    current_device,
    device_count,
    index_of,
)
from torchstrategy.testing._simulation.program import watched_thread
from torchstrategy.testing._simulation.streams import identity_of_current_stream


@contextmanager
def as_a_process(rank: int) -> Iterator[None]:
    """A block in which those who listen take this thread for a process of its own."""
    for listener in listeners():
        listener.rank_begins(rank)
    with watched_thread():
        yield


def ranks_end() -> None:
    """Says that all ranks have ended."""
    for listener in listeners():
        listener.ranks_end()


def device_of(tensors: Sequence[torch.Tensor]) -> int | None:
    """The index of the device that some tensors are on; None for the CPU.

    If there are no tensors, it is the current device.
    """
    if tensors:
        return index_of(tensors[0])
    return current_device() if device_count() else None


@final
class Moments:
    """The moments of one rank in one collective.

    Args:
        kind: Which collective.
        device: The device of its tensors.
        where: The line of the program.
    """

    def __init__(self, kind: str, device: int | None, where: str) -> None:
        self._kind, self._device = kind, device
        stream = self._stream()
        self._came = {
            listener: Arrival(stream, listener.came(stream), where)
            for listener in listeners()
        }

    def received(self, ends: Mapping[Listener, Any]) -> None:
        """Says that the rank waits for what it gets."""
        for listener in listeners():
            if listener in ends:
                listener.received(self._stream(), ends[listener], self._kind)

    def _stream(self) -> Stream | None:
        return (
            None if self._device is None else identity_of_current_stream(self._device)
        )

    def of(self, listener: Listener) -> Arrival | None:
        """What a listener noted; None if it did not listen yet."""
        return self._came.get(listener)


def met(kind: str, size: int, ranks: Sequence[Moments]) -> dict[Listener, Any]:
    """Says that all ranks have come; returns the moment at which this is over.

    Each listener notes this moment in its own way.
    """
    ends = {}
    for listener in listeners():
        arrivals = [
            arrival
            for arrival in (moments.of(listener) for moments in ranks)
            if arrival is not None
        ]
        if len(arrivals) == len(ranks):
            ends[listener] = listener.met(Meeting(kind, size, arrivals))
    return ends
