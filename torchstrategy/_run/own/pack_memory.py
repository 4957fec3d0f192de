"""The memory in which the tensors of a pack travel together.

The next step uses this memory again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from torchstrategy._base.memory import memory_at
from torchstrategy._base.torch_internals import foreach_copy_
from torchstrategy._group.native_dtypes import can_be_added
from torchstrategy._run.own.gradient_parts import multiply, weigh
from torchstrategy._run.own.gradient_plans import GradientPlan, Pack
from torchstrategy._run.own.mark_format import Mark, Verdict, mark_format


@final
class PackMemory:
    """The memory of one pack.

    Small gradients come first, then buffers, then numbers of which all workers get the
    sums.

    The gradients of a step are copied into it, and the sums out of it into the same
    gradients. That takes half of the time in which `flatten` and `unflatten` make new
    memory and a view for each sum, and nobody has a view that the next step writes.

    Args:
        pack: Which gradients and buffers it holds.
        parameters: All parameters.
        buffers: The buffers that are sent, by their positions.
        num_workers: How many workers there are, of which each adds a mark. 0: none
            rides along.

    Attributes:
        pack: As given.
        sent: All of it, in a dtype that can be added up.
        num_sent: How many numbers that is.
        gradients: The part of each gradient, in the order of the pack.
        buffers: The part of each buffer, by its position.
    """

    def __init__(
        self,
        pack: Pack,
        parameters: Sequence[torch.Tensor],
        buffers: dict[int, torch.Tensor],
        num_workers: int,
    ) -> None:
        self.pack = pack
        self._marks = mark_format(num_workers, pack.dtype) if num_workers else None
        num_numbers = 0 if self._marks is None else self._marks.length
        like = [parameters[i] for i in pack.gradients] + [
            buffers[i] for i in pack.buffers
        ]
        num_of_tensors = sum(tensor.numel() for tensor in like)
        flat = torch.zeros(
            num_of_tensors + num_numbers, dtype=pack.dtype, device=pack.device
        )
        pieces = flat[:num_of_tensors].split([tensor.numel() for tensor in like])
        parts = [
            piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)
        ]
        self.gradients = parts[: len(pack.gradients)]
        self.buffers = dict(
            zip(pack.buffers, parts[len(pack.gradients) :], strict=True)
        )
        num_gradients, num_averaged, num_taken = pack.sizes
        self._weighed, self._averaged, self._taken, numbers = flat.split(
            [num_gradients, num_averaged, num_taken, num_numbers]
        )
        # The first pack, which has them, is in the memory of the CPU.
        self._mark = memory_at(
            numbers.data_ptr(), 0 if self._marks is None else self._marks.num_bytes
        )
        # Buffers that are taken from one worker may have any dtype: the bytes of the
        # others are zeros.
        self.sent = flat if can_be_added(flat.dtype) else flat.view(torch.uint8)
        self.num_sent = self.sent.numel()

    def put_gradients(
        self, own: list[torch.Tensor], weight: float | torch.Tensor
    ) -> None:
        """Copies the gradients of this worker into it, and weighs them."""
        if self.gradients:
            foreach_copy_(self.gradients, own)
            weigh(self._weighed, weight)

    def put_buffers(
        self, own: dict[int, torch.Tensor], weight: float, leads: bool
    ) -> None:
        """Copies this worker's buffers into the pack, and weighs some of them.

        It weighs the buffers of which all workers get the mean.

        Args:
            own: The buffers by their positions.
            weight: How much this worker counts.
            leads: Whether the other buffers become those of this worker.
        """
        for i, part in self.buffers.items():
            part.copy_(own[i])
        if len(self._averaged):
            weigh(self._averaged, weight)
        if len(self._taken) and not leads:
            self._taken.zero_()

    def put_mark(self, mark: Mark | None) -> None:
        """Writes the mark that travels along; None: zeros, whose sums tell nothing."""
        assert self._marks is not None
        self._mark.raw = (
            bytes(self._marks.num_bytes) if mark is None else self._marks.write(mark)
        )

    def read_marks(self, own: Mark) -> Verdict:
        """What the marks of all workers tell, once the sums are there.

        `own`: that of this worker.
        """
        assert self._marks is not None
        return self._marks.read(self._mark.raw, own)

    def multiply_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiplies the sums of gradients, once they are there."""
        # A pack of nothing but a mark is on the CPU, where the host would wait for the
        # factor.
        if self.gradients:
            multiply(self._weighed, factor)

    def sums_of_gradients(self, own: list[Any], are_dense: bool) -> list[torch.Tensor]:
        """The sums over all workers, once they are there.

        They lie in the memory of this worker's gradients, if it has any.

        Args:
            own: The gradients of this worker.
            are_dense: Whether it has all of them, and none is sparse.
        """
        sums: list[torch.Tensor] = own
        if not are_dense:
            sums = [
                torch.empty_like(part)
                if gradient is None or gradient.layout is not torch.strided
                else gradient
                for gradient, part in zip(own, self.gradients, strict=True)
            ]
        if sums:
            foreach_copy_(sums, self.gradients)
        return sums


@final
class PackMemories:
    """The memories of the plans in use.

    Only those of a few plans are kept.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._known: dict[GradientPlan, list[PackMemory]] = {}

    def of(
        self,
        plan: GradientPlan,
        parameters: Sequence[torch.Tensor],
        buffers: dict[int, torch.Tensor],
    ) -> list[PackMemory]:
        """The memories of the packs of a plan."""
        known = self._known.get(plan)
        if known is not None:
            return known
        if len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)))
        first, *others = plan.packs
        made = [PackMemory(first, parameters, buffers, self._num_workers)]
        made += [PackMemory(pack, parameters, buffers, 0) for pack in others]
        self._known[plan] = made
        return made


_MOST = 4  # plans: those of so many exchanges that follow one another in turns
