"""How the pieces of one replica come to its device.

Three threads may have a part in it; without reading ahead all three are the caller's:

    reading thread     depart    what is on an accelerator already, it moves: there, its current stream made it
    replica's worker   carry     what is in host memory is pinned and copied, on the copy stream of the device
    consumer's thread  arrive    its current stream waits for both, and keeps the memory that they took

The copies are allocated on the copy stream, so its next copies may take their memory as soon as the consumer drops
them; `record_stream` tells the allocator to wait until the consumer's stream has done what it was given before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from torchstrategy._communication.transfer import copy_stream
from torchstrategy._core.devices import is_accelerator, memory_device
from torchstrategy._core.distributed_values import Unmade
from torchstrategy._core.types import Device, Tree
from torchstrategy._input.batch_types import applied, applied_within, memory_of, moved


class StagedBatch(NamedTuple):
    """Pieces of one replica, on their way or arrived."""

    parts: list[Tree]
    moved: list[torch.Tensor]  # the tensors that the consumer's stream has to wait for
    events: list[torch.Event]  # when they are there


@final
class Route:
    """The way to the device of one replica.

    Args:
        device: Where pieces go. None: they stay where they are.
        is_only: Whether there is no other replica, and its pieces are whole elements, in containers.
    """

    def __init__(self, device: Device | None, *, is_only: bool) -> None:
        self.device = None if device is None else memory_device(device)
        self._applied = applied_within if is_only else applied
        self.has_copies = device is not None and is_accelerator(device)  # that a worker could make ahead

    def stage(self, parts: Sequence[Tree]) -> StagedBatch:
        """Runs on the reading thread, on its current streams."""
        sent: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if self.device is None or tensor.is_cpu:
                return tensor
            there = tensor.to(self.device, non_blocking=self.has_copies)
            if self.has_copies:
                sent.append(there)
            return there

        departed = [
            self._sent_if_made(piece) if type(piece) is Unmade else self._applied(piece, move) for piece in parts
        ]
        events = [torch.accelerator.current_stream(self.device).record_event()] if sent else []
        return StagedBatch(departed, sent, events)

    def _sent_if_made(self, piece: Unmade) -> Unmade:
        return Unmade(lambda: piece.make() if self.device is None else moved(piece.make(), self.device))

    def copy(self, staged: StagedBatch) -> StagedBatch:
        """Runs on the replica's worker, if it has one. Only where `has_copies`."""
        device = self.device
        assert device is not None
        moved: list[torch.Tensor] = []
        stream = copy_stream(device)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cpu:
                return tensor
            moved.append(_pinned(tensor).to(device, non_blocking=True))
            return moved[-1]

        with stream:  # which makes its device the current one, too: pinned memory is made for that
            parts = [self._applied(piece, copy) for piece in staged.parts]
            events = [stream.record_event()] if moved else []
        return StagedBatch(parts, [*staged.moved, *moved], [*staged.events, *events])

    def receive(self, staged: StagedBatch) -> list[Tree]:
        """Runs on the consumer's thread; its current stream of the device waits, the thread does not."""
        if staged.moved:
            stream = torch.accelerator.current_stream(self.device)
            for event in staged.events:
                stream.wait_event(event)
            for tensor in staged.moved:
                for held in memory_of(tensor):
                    held.record_stream(stream)
        return staged.parts


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory that the device can read by itself; only so a copy does not hold up the thread."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if 0 in tensor.stride():
        tensor = tensor.contiguous()  # pinned memory is filled by strides, and cannot be where they are 0
    return tensor.pin_memory()  # itself, where it is in such memory
