"""Which gradients the workers send when a backward ends, and in which order.

All workers send the same gradients in the same order.

Workers that send tensors of other sizes to one another would mix them up, or end: gloo
aborts the process. So a plan follows from what all workers know, and from nothing that
one of them knows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from torchstrategy._run.own.mark_format import SUMMED
from torchstrategy._run.own.trained_tensors import BufferLayout, TrainedTensors

# What some worker has as the gradient of a parameter. The gradient of the whole batch
# has the greatest of these.
NONE, SPARSE, DENSE = 0, 1, 2
# A dense gradient that one backward adds in several parts, as reentrant checkpoints do.
SEVERAL = 3

# From this number of bytes on, a gradient is sent by itself: packing it would take
# longer.
LARGE = 1 << 18
# From this number on, large gradients are worth the hooks that send them while backward
# goes on.
_FEW = 2


class Pack(NamedTuple):
    """Tensors of one dtype and device, which are sent together."""

    dtype: torch.dtype
    device: torch.device
    gradients: list[int]  # the positions of parameters
    averaged: list[int]  # the positions of buffers that become the mean of the workers'
    taken: list[int]  # the positions of buffers that become those of the first worker
    # How many numbers the gradients have, and the averaged and the taken buffers.
    sizes: list[int]

    @property
    def buffers(self) -> list[int]:
        """The positions of all buffers, in the order in which they are sent."""
        return self.averaged + self.taken


@final
class GradientPlan:
    """What the workers send when a backward ends.

    Args:
        kinds: For each parameter, the kind of gradient that some worker has.
        buffers: The buffers that all workers have, if some worker has written any.
        parameters: All parameters.
        averaged: The buffers that become the mean of the workers', by their positions.
        taken: The buffers that become those of the first worker, by their positions.
        can_overlap: Whether gradients may be sent while backward goes on.

    Attributes:
        large: The positions of gradients that are sent each by itself, in the order in
            which they are sent.
        early: The first of these, which are sent while backward goes on, as soon as
            they are there.
        packs: What is sent together when backward has ended. The first one has room for
            the numbers of a `Mark`.
        sparse: The positions of sparse gradients.
    """

    def __init__(
        self,
        kinds: bytes,
        buffers: BufferLayout | None,
        parameters: Sequence[torch.Tensor],
        averaged: dict[int, torch.Tensor],
        taken: dict[int, torch.Tensor],
        can_overlap: bool,
    ) -> None:
        self.kinds = kinds
        self.buffers = buffers
        dense = [i for i, kind in enumerate(kinds) if kind >= DENSE]
        # Backward comes to the parameters of the last layer first.
        large = [i for i in reversed(dense) if parameters[i].nbytes >= LARGE]
        early = [i for i in large if kinds[i] == DENSE] if can_overlap else []
        self.early = early if len(early) >= _FEW else []
        self.large = self.early + [i for i in large if i not in set(self.early)]
        self.sparse = [i for i, kind in enumerate(kinds) if kind == SPARSE]
        self.packs = _packs(
            [i for i in dense if i not in set(large)], parameters, averaged, taken
        )


@final
class KnownPlans:
    """The plans of past exchanges, and a prediction of which comes next.

    Args:
        tensors: The parameters and buffers.
        can_overlap: Whether gradients may be sent while backward goes on.

    Attributes:
        predicted: That of the next exchange: what followed the newest one before. None:
            there was no exchange yet.
    """

    def __init__(self, tensors: TrainedTensors, can_overlap: bool) -> None:
        self._tensors = tensors
        self._can_overlap = can_overlap
        self._made: dict[tuple[bytes, BufferLayout | None], GradientPlan] = {}
        self._newest: GradientPlan | None = None
        self._after: dict[GradientPlan | None, GradientPlan] = {}
        self.predicted: GradientPlan | None = None

    def of(self, kinds: bytes, buffers: BufferLayout | None) -> GradientPlan:
        """The plan of an exchange of such gradients and buffers; see `GradientPlan`."""
        key = kinds, buffers
        if key not in self._made:
            # This happens in all workers at once, since they have made the same plans.
            if len(self._made) >= _MOST_PLANS:
                self._made.clear()
                self._after.clear()
            of_buffers = (
                ({}, {})
                if buffers is None
                else (self._tensors.averaged(), self._tensors.taken())
            )
            self._made[key] = GradientPlan(
                *key, self._tensors.parameters, *of_buffers, self._can_overlap
            )
        return self._made[key]

    def note(self, plan: GradientPlan) -> None:
        """Says that this was the plan of the newest exchange."""
        self._after[self._newest], self._newest = plan, plan
        self.predicted = self._after.get(plan, plan)


# How many plans are kept: where each step uses other parameters, there would be more
# and more.
_MOST_PLANS = 100


def dtype_of_gradient(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient, which may differ from the parameter's.

    See `torch.Tensor.grad_dtype`.
    """
    return parameter.grad_dtype or parameter.dtype


def _packs(
    small: Sequence[int],
    parameters: Sequence[torch.Tensor],
    averaged: dict[int, torch.Tensor],
    taken: dict[int, torch.Tensor],
) -> list[Pack]:
    """The packs, of which the first one can hold the numbers of a `Mark`."""
    packs: dict[tuple[torch.dtype, torch.device], Pack] = {}

    def pack_of(dtype: torch.dtype, device: torch.device) -> Pack:
        return packs.setdefault(
            (dtype, device), Pack(dtype, device, [], [], [], [0, 0, 0])
        )

    for i in small:
        pack = pack_of(dtype_of_gradient(parameters[i]), parameters[i].device)
        pack.gradients.append(i)
        pack.sizes[0] += parameters[i].numel()
    for i, buffer in averaged.items():
        pack = pack_of(buffer.dtype, buffer.device)
        pack.averaged.append(i)
        pack.sizes[1] += buffer.numel()
    for i, buffer in taken.items():
        pack = pack_of(buffer.dtype, buffer.device)
        pack.taken.append(i)
        pack.sizes[2] += buffer.numel()
    first = next((pack for pack in packs.values() if _holds_marks(pack)), None)
    if first is None:
        first = Pack(torch.float64, torch.device("cpu"), [], [], [], [0, 0, 0])
    return [first, *(pack for pack in packs.values() if pack is not first)]


def _holds_marks(pack: Pack) -> bool:
    # To read a number of an accelerator, the host would have to wait for all that the
    # accelerator has to do.
    return pack.dtype in SUMMED and pack.device.type == "cpu"
