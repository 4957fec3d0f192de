"""How a replica's part of a batch comes to its device.

Three threads may work on it; without prefetching, all three are the caller's thread:

    reading thread     `stage`    moves tensors that are on an accelerator already: its current stream has made them
    replica's worker   `copy`     pins tensors in host memory and copies them, on the copy stream of the device
    consumer's thread  `receive`  makes its current stream wait for both, and keeps their memory until it is used
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from torchstrategy._communication.transfer import copy_stream
from torchstrategy._core.devices import is_accelerator, memory_device
from torchstrategy._core.distributed_values import Unmade
from torchstrategy._core.types import Device, Tree
from torchstrategy._input.batch_types import applied_within, memory_of, moved


class StagedBatch(NamedTuple):
    """The part of a batch for one replica, which is being copied or has been copied."""

    parts: list[Tree]
    moved: list[torch.Tensor]  # the tensors that the consumer's stream has to wait for
    events: list[torch.Event]  # they happen when these tensors are on the device


# Note [Promises for a copied batch]
# A batch is copied to an accelerator on other streams than the consumer's, so the consumer is given two promises:
# 1. Its stream reads a tensor only when the copy is complete. `stage` and `copy` record an event after their copies,
#    and `receive` makes the consumer's current stream wait for it. The consumer's thread does not wait.
# 2. The memory of a tensor is kept until its stream has used it. The copies are allocated on the copy stream. When the
#    consumer drops one, the allocator would give its memory to the next copy at once, though kernels that read it may
#    still be queued on the consumer's stream. `record_stream` makes the allocator wait for these.
# Both are given in `receive`, since only the consumer's thread knows on which stream the batch will be used.
@final
class Route:
    """The way to the device of one replica.

    Args:
        device: The device to which tensors are copied. None: they stay where they are.
    """

    def __init__(self, device: Device | None) -> None:
        self.device = None if device is None else memory_device(device)
        self.has_copies = device is not None and is_accelerator(device)  # whether a worker could copy ahead

    def stage(self, parts: Sequence[Tree]) -> StagedBatch:
        """Moves tensors that are on an accelerator. Runs on the reading thread, on its current streams."""
        sent: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if self.device is None or tensor.is_cpu:
                return tensor
            there = tensor.to(self.device, non_blocking=self.has_copies)
            if self.has_copies:
                sent.append(there)
            return there

        departed = [
            self._sent_if_made(piece) if type(piece) is Unmade else applied_within(piece, move) for piece in parts
        ]
        events = [torch.accelerator.current_stream(self.device).record_event()] if sent else []
        return StagedBatch(departed, sent, events)

    def _sent_if_made(self, piece: Unmade) -> Unmade:
        return Unmade(lambda: piece.make() if self.device is None else moved(piece.make(), self.device))

    def copy(self, staged: StagedBatch) -> StagedBatch:
        """Copies tensors of host memory. Runs on the replica's worker, if it has one. Called only if `has_copies`."""
        device = self.device
        assert device is not None
        moved: list[torch.Tensor] = []
        stream = copy_stream(device)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cpu:
                return tensor
            moved.append(_pinned(tensor).to(device, non_blocking=True))
            return moved[-1]

        with stream:  # also makes its device the current one, for which torch pins memory
            parts = [applied_within(piece, copy) for piece in staged.parts]
            events = [stream.record_event()] if moved else []
        return StagedBatch(parts, [*staged.moved, *moved], [*staged.events, *events])

    def receive(self, staged: StagedBatch) -> list[Tree]:
        """Runs on the consumer's thread. See Note [Promises for a copied batch]."""
        if staged.moved:
            stream = torch.accelerator.current_stream(self.device)
            for event in staged.events:
                stream.wait_event(event)
            # `record_stream` is for the memory of dense tensors, so the parts of a sparse or nested one are recorded.
            for tensor in staged.moved:
                for held in memory_of(tensor):
                    held.record_stream(stream)
        return staged.parts


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in pinned memory, from which the device can copy by itself, so that the thread need not wait for it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if 0 in tensor.stride():
        tensor = tensor.contiguous()  # torch keeps the strides in pinned memory, and cannot write where they are 0
    return tensor.pin_memory()  # returns the tensor itself if it is pinned already
