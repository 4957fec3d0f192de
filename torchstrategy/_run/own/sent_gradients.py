"""How gradients are sent, alone or in packs, and how much this worker's count.

`own_gradients` decides when they are sent, and a plan of `gradient_plans` which of them
and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._group.reductions import sum_of_sparse
from torchstrategy._group.workers import Workers
from torchstrategy._run.own.counted_gradients import CountedGradients, Settled
from torchstrategy._run.own.gradient_parts import as_sent, weigh, weigh_into
from torchstrategy._run.own.gradient_plans import GradientPlan
from torchstrategy._run.own.mark_format import Mark, Verdict
from torchstrategy._run.own.pack_memory import PackMemories, PackMemory
from torchstrategy._run.own.trained_tensors import BufferLayout, TrainedTensors

Arrived = Callable[[], None]  # waits until a sum is there
_ask_nobody: Callable[[], float] = float  # is not called, since nothing was counted


# Note [Gradients that are weighed by a count]
# `weight` is how much the replica counts by its rows, and `sent_weight` what the
# gradients of a backward are multiplied by. They differ where the loss was divided by
# something else than rows, see Note [When workers compare their losses].
# `CountedGradients` say so of the next backward: a count and a mark ride along. If all
# have the same mark, the sums are multiplied by what follows of the sum of the counts.
# Else the workers ask, and send everything once more, also large gradients: those of
# this worker are kept for that.
class SentGradients:
    """The part of `OwnGradients` that sends.

    It sends each large gradient by itself, and all others in packs.

    Args:
        workers: The processes that train together.

    Attributes:
        weight: How much the replica counts by its rows.
        sent_weight: What the gradients of a backward are multiplied by.
        loss_factor: How much more than its rows the loss of the newest backward counts.
            None: its terms are not alike.
    """

    weight: float
    sent_weight: float | torch.Tensor
    loss_factor: float | torch.Tensor | None
    _weight_of_buffers: float
    _leads: bool
    _name: str
    _are_dense: bool
    # Of large gradients, by the positions of their parameters: the sums, those that
    # wait for their turn to be sent, and what this worker had before it weighed them by
    # a count.
    _sums: dict[int, torch.Tensor]
    _waiting: dict[int, torch.Tensor]
    _unweighed: dict[int, torch.Tensor]
    _under_way: list[Arrived]
    _verdict: Verdict | None

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.tensors = TrainedTensors([], [], averages_buffers=True)
        self._memories = PackMemories(workers.count)
        self._counted: CountedGradients | None = None
        self._ask: Callable[[], float] = _ask_nobody
        self._is_unforeseen = False
        self._unweighed = {}
        # Memory for a weighed gradient, by the position of its parameter.
        self._staged: dict[int, torch.Tensor] = {}

    # How much they count

    def count_next(self, counted: CountedGradients, ask: Callable[[], float]) -> None:
        """Says how much the gradients of the next backward count.

        Args:
            counted: How much.
            ask: Called in all workers if that does not fit together. It returns what
                the weight of rows is to be multiplied by.
        """
        self._counted, self._ask = counted, ask
        if counted.weight is not None:
            self.sent_weight = counted.weight

    def multiply_next(self, factor: float) -> None:
        """Multiplies the weight of rows for the next backward."""
        self.sent_weight = self.weight * factor
        self.loss_factor = factor

    def note_loss(self, factor: float | None) -> None:
        """Says how much more than its rows the loss of the next backward counts.

        None: its terms are not alike.
        """
        self.loss_factor = factor

    def forget_counts(self) -> None:
        """Forgets how a backward was weighed, once it is over."""
        self._counted, self._ask, self._is_unforeseen = None, _ask_nobody, False
        self._unweighed = {}
        self.sent_weight = self.weight

    def _settle_counts(self, counted: CountedGradients) -> Settled | None:
        """What follows from all workers' counts; None if they do not fit together."""
        assert self._verdict is not None
        return (
            counted.settle(self._verdict.counts)
            if self._verdict.all_are_there
            else None
        )

    def _weigh_sums(self, settled: Settled, memories: Sequence[PackMemory]) -> None:
        """Weighs sums of gradients that were multiplied by counts.

        What is sent from here on has the right weight.
        """
        factor, weight = settled
        if weight is not None:
            self.sent_weight, self.loss_factor = weight, weight / self.weight
        if not isinstance(factor, torch.Tensor) and factor == 1.0:
            # The sums stay where they are, and the staged memory is free for the next
            # step.
            self._staged.update(self._unweighed)
            return
        for memory in memories:
            memory.multiply_gradients(factor)
        for i, own in self._unweighed.items():
            on_device = (
                factor.to(own.device) if isinstance(factor, torch.Tensor) else factor
            )
            self._sums[i] = torch.mul(self._sums[i], on_device, out=own)

    # What is sent

    def _send_waiting(self, plan: GradientPlan) -> None:
        """Sends the large gradients that are there, in the order of the plan.

        All workers keep this order.
        """
        while (
            len(self._sums) < len(plan.early)
            and (i := plan.early[len(self._sums)]) in self._waiting
        ):
            self._send_large(i, self._waiting.pop(i))

    def _send_large(self, i: int, gradient: torch.Tensor) -> None:
        with without_autograd():
            gradient = gradient.contiguous()
            if self._counted is None:
                weigh(gradient, self.sent_weight)
            else:
                self._unweighed[i], gradient = (
                    gradient,
                    self._staged_memory(i, gradient),
                )
                weigh_into(gradient, self._unweighed[i], self.sent_weight)
            self._sums[i] = gradient
            self._under_way.append(
                self._workers.begin_all_reduce(gradient.view(-1), self._name)
            )

    def _staged_memory(self, i: int, like: torch.Tensor) -> torch.Tensor:
        """Memory from which a large gradient is sent while the gradient has to stay.

        The memory is kept, since new memory is slow.
        """
        known = self._staged.get(i)
        if known is None or (known.shape, known.dtype, known.device) != (
            like.shape,
            like.dtype,
            like.device,
        ):
            self._staged[i] = known = torch.empty_like(like)
        return known

    def _send_and_await(
        self,
        plan: GradientPlan,
        own: list[torch.Tensor | None],
        rest: Sequence[int] = (),
    ) -> list[PackMemory]:
        """Sends what was not sent yet, and waits for the sums.

        Those of large gradients are in `_sums` then.

        Args:
            plan: What to send.
            own: The gradients of this worker that it has not sent during backward.
            rest: The positions of large gradients to which backward has added after the
                first part was sent.

        Returns:
            The sums of the others, and of the buffers.
        """
        first_parts = {i: self._sums.pop(i) for i in rest}
        for i in rest:
            self._staged.pop(i, None)  # the first part is there
        # Zeros for the mark: the sums have the same bits only where what is sent has
        # the same length.
        memories = self._send(plan, own, None)
        self._await_sums()
        for i, part in first_parts.items():
            self._sums[i] = self._sums[i] + part
        return memories

    def _send(
        self, plan: GradientPlan, own: list[torch.Tensor | None], mark: Mark | None
    ) -> list[PackMemory]:
        """Begins to send what was not sent yet, and a mark with it.

        Returns the memory in which the sums will be.
        """
        for i in plan.large:
            if i not in self._sums:
                self._send_large(i, self._large_of(i, own))
        buffers = {} if plan.buffers is None else self._buffers_for(plan.buffers, plan)
        memories = self._memories.of(plan, self.tensors.parameters, buffers)
        memories[0].put_mark(mark)
        for memory in memories:
            self._send_pack(memory, own, buffers)
        return memories

    def _send_total(self, counted: CountedGradients) -> None:
        """Begins to add up a count that is in the memory of an accelerator.

        It is sent when all others are.
        """
        if counted.total is not None:
            self._under_way.append(
                self._workers.begin_all_reduce(counted.total.view(1), self._name)
            )

    def _await_sums(self) -> None:
        """Waits until the sums are there."""
        for arrived in self._under_way:
            arrived()
        self._under_way = []

    def _buffers_for(
        self, layout: BufferLayout, plan: GradientPlan
    ) -> dict[int, torch.Tensor]:
        """The buffers that a plan sends.

        Zeros, if this worker has others by now: then it is not the right plan.
        """
        if self.tensors.layout() == layout:
            return {
                i: buffer
                for i, buffer in enumerate(self.tensors.buffers)
                if buffer is not None
            }
        devices = {i: pack.device for pack in plan.packs for i in pack.buffers}
        rows = zip(layout.positions, layout.shapes, layout.dtypes, strict=True)
        return {
            i: torch.zeros(shape, dtype=dtype, device=devices[i])
            for i, shape, dtype in rows
        }

    def _large_of(self, i: int, own: list[torch.Tensor | None]) -> torch.Tensor:
        held, gradient = self._waiting.pop(i, None), own[i]
        if held is not None:
            return held
        return as_sent(gradient, self.tensors.parameters[i])

    def _send_pack(
        self,
        memory: PackMemory,
        own: list[torch.Tensor | None],
        buffers: dict[int, torch.Tensor],
    ) -> None:
        """Begins to send a pack."""
        gradients = self._of_pack(own, memory)
        if not self._are_dense:
            positions = memory.pack.gradients
            gradients = [
                as_sent(g, self.tensors.parameters[i])
                for i, g in zip(positions, gradients, strict=True)
            ]
        memory.put_gradients(gradients, self.sent_weight)
        if memory.buffers:
            memory.put_buffers(buffers, self._weight_of_buffers, self._leads)
        if memory.num_sent:
            self._under_way.append(
                self._workers.begin_all_reduce(memory.sent, self._name)
            )

    def _of_pack(self, own: list[Any], memory: PackMemory) -> list[Any]:
        """The gradients of a pack."""
        positions = memory.pack.gradients
        return own if len(positions) == len(own) else [own[i] for i in positions]

    def _sparse_sum(self, i: int, own: torch.Tensor | None) -> torch.Tensor:
        weight = float(self.sent_weight)
        weighed = own.coalesce() * weight if own is not None and weight else None
        return sum_of_sparse(
            self._workers, weighed, self.tensors.parameters[i], "a sparse gradient"
        )
