"""One replica of one run: it can synchronize with the others.

At a synchronization point, every replica brings a value and gets a result. When all
replicas are there, the function `combine` runs once, on the thread that called `run`,
while all replicas stand still. `merge_call`, `all_reduce` and `optimizer.step` are
synchronization points.

The all-reduce and all-gather of a `ReplicaGroup` are differentiable. Replica i has the
weight w_i. The parameters get the sum, over all replicas, of w_i times the gradient in
replica i. So a gradient in replica i has to be the gradient of the whole step, divided
by w_i. Where the output of replica j depends on the input of replica i, the gradient of
that output is therefore multiplied by w_j / w_i on its way to replica i. With equal
weights, and for SUM, this is a plain sum. See Note [Where a gradient is weighed] in
`weighing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, final

import torch

from torchstrategy._base.context import current_replica_context, outside_of_strategies
from torchstrategy._base.devices import memory_device
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.torch_internals import hide_from_compiler
from torchstrategy._base.trace import traced
from torchstrategy._base.types import Device, Tree
from torchstrategy._group.device_streams import NO_SIDE_STREAM, DeviceStreams, keep_for
from torchstrategy._group.instruments import tell_held, tell_reached
from torchstrategy._group.participants import Participants
from torchstrategy._group.reductions import check_addable, check_gatherable
from torchstrategy._group.transfer import (
    combine_in_buckets,
    concatenate_on,
    sum_each_on,
    sum_on,
)
from torchstrategy._group.workers import LONE, Workers, refusing

# The function of a synchronization point: it takes the values that the replicas brought
# and returns their results. Both are in replica order.
Combine = Callable[[Sequence[Tree]], Sequence[Tree]]


class ReplicaStopped(BaseException):
    """Stops a replica because another one failed.

    It is not an `Exception`, so that a step with `except Exception` does not catch it
    and go on.
    """


class Watch(Protocol):
    """An observer, which is called whenever a replica goes on or stands still.

    The call comes on the thread that called `run`.

    Attributes:
        take_turns: Whether the replicas should run one at a time, whichever devices
            they are on.
    """

    take_turns: bool

    def look(self, running: Collection[int]) -> None:
        """Called with the replicas that may have run since the last call.

        There are none at the start of the run, and after a synchronization point.
        """

    def begin_turn(self, replica: int) -> None:
        """Called before a replica goes on, while it stands still."""


@dataclass(eq=False)
class Replica(ABC):
    """One replica of one run.

    Args:
        index: The id of the replica.
        device: The device on which it runs.
        device_streams: The caller's streams, and those on which replicas work besides.
            None: all is on CPUs.
    """

    index: int
    device: Device
    device_streams: DeviceStreams | None = field(default=None, kw_only=True)
    was_asked = False  # whether the step asked which replica it is in
    # How often the step has called a method of its context that synchronizes.
    num_calls = 0
    # Told of each synchronization point to which the replica comes. None: there is
    # nobody to tell, in other processes.
    telling: Callable[[str], None] | None = field(default=None, init=False)

    @abstractmethod
    def synchronize(
        self, name: str, combine: Combine, brought: Tree, is_for_some: bool = False
    ) -> Tree:
        """Waits until every replica of the run is at this synchronization point.

        It returns the result for this replica.

        Args:
            name: The name of the synchronization point, as the user would write it:
                `"optimizer.step()"`.
            combine: Called once, on the thread that called `run`. Of the replicas'
                functions, that of the lowest replica is called.
            brought: The value that this replica brings.
            is_for_some: Whether replicas that stand at another point, or have ended,
                need not come to it. Then `combine` gets what the others have brought.

        Raises:
            RuntimeError: From `run`, if the replicas are at different synchronization
                points, or some have ended.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stands still until it is this replica's turn again, which may be at once."""


def _do_nothing() -> None:
    pass


@final
@dataclass(eq=False)
class InlineReplica(Replica):
    """The only replica of a run, on the caller's thread.

    It is alone at its synchronization points.

    Args:
        callers_device: The default device of the caller, in which `combine` runs. None:
            that of the replica.
    """

    callers_device: Device | None = None
    # The block in which `combine` runs: where the replica has a random stream of its
    # own, with the caller's.
    combining: Callable[[], AbstractContextManager[None]] = nullcontext
    # Called before the replica goes on.
    go_on: Callable[[], None] = _do_nothing

    def pause(self) -> None:
        pass  # no other replica could go on meanwhile

    def synchronize(
        self, name: str, combine: Combine, brought: Tree, is_for_some: bool = False
    ) -> Tree:
        tell_reached(self.index, name)
        if self.telling is not None:
            self.telling(name)
        tell_held(name)
        # With several replicas, `combine` runs on the caller's thread, outside of all
        # replicas. Here the replica is on the caller's thread, so its frame and its
        # default device have to be put aside for a while. See Note [Who may call what
        # on which thread].
        with (
            NO_SIDE_STREAM
            if self.device_streams is None
            else self.device_streams.standing_still() as side,
            outside_of_strategies(self.callers_device),
            self.combining(),
            traced("synchronize at {}", name),
        ):
            answer = combine([brought])[0]
            self.go_on()
        if side:
            keep_for(side, answer)
        return answer


# For each tensor, the tensors of the replicas, in replica order.
_Columns = list[tuple[torch.Tensor, ...]]
# A function from the gradients of outputs to those of inputs.
_Cut = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@final
@dataclass(eq=False)
class ReplicaGroup:
    """Lets a replica synchronize with the others.

    The strategy makes one for each replica and each call of the step.

    Args:
        replica: This replica.
        participants: The replicas that are in the run, and how much the gradient of
            each counts.
        devices: The device of each replica of the strategy. None: the device of the
            tensors that it brings.
        workers: The processes that train together. `participants` and `devices` are of
            this one.
        bytes_per_pack: How many bytes are sent together at most. 0: each tensor is sent
            by itself.
    """

    replica: Replica
    participants: Participants
    devices: Sequence[Device | None]
    workers: Workers = LONE
    bytes_per_pack: int = 0

    def with_buckets(self, bytes_per_pack: int) -> ReplicaGroup:
        """The same group, with buckets of tensors of at most `bytes_per_pack` bytes."""
        return replace(self, bytes_per_pack=bytes_per_pack)

    @property
    def weight(self) -> float:
        """The factor of this replica's gradient; 0 if the gradient is dropped."""
        return self.participants.weights[self.replica.index]

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str] = (),
        name: str = "all_reduce",
    ) -> list[torch.Tensor]:
        """The sums of the replicas' tensors, one by one, on this replica's device.

        Args:
            tensors: The tensors of this replica.
            names: The name of each tensor, the same in every replica.
            name: The name of the synchronization point.

        Raises:
            ValueError: From `run`, if the shapes or dtypes of what they bring differ.
        """
        outputs, wants_grad, _ = self._exchange(
            name, tensors, self._sum_columns, self._add_over_workers, names
        )
        return self._differentiable(tensors, outputs) if wants_grad else outputs

    def all_gather(
        self,
        tensors: Sequence[torch.Tensor],
        axis: int,
        names: Sequence[str] = (),
        name: str = "all_gather",
    ) -> list[torch.Tensor]:
        """The tensors of all replicas, joined along `axis`, on this replica's device.

        They stand in replica order.

        Args:
            tensors: The tensors of this replica.
            axis: The dimension along which they are concatenated.
            names: The name of each tensor, the same in every replica.
            name: The name of the synchronization point.

        Raises:
            ValueError: From `run`, if they differ in another dimension, in rank or in
                dtype.
        """
        # For each tensor, where the part of each replica of this worker begins. One
        # replica fills it for all.
        starts: list[list[int]] = []

        def check(column: Sequence[torch.Tensor]) -> None:
            check_gatherable(column, axis)
            starts.append(
                list(accumulate((tensor.shape[axis] for tensor in column), initial=0))
            )

        def join(r: int, columns: _Columns) -> list[torch.Tensor]:
            def copy(column: Sequence[torch.Tensor]) -> torch.Tensor:
                return column[0].to(self._device_for(r, column))

            there = []  # for each replica, its tensors on the device of this one
            for tensors in zip(*columns, strict=True):
                single = [[tensor] for tensor in tensors]
                there.append(combine_in_buckets(single, self.bytes_per_pack, copy))
            return [
                concatenate_on(column, axis, self._device_for(r, column))
                for column in zip(*there, strict=True)
            ]

        def gather_over_workers(
            tensors: Sequence[torch.Tensor], point: str
        ) -> list[torch.Tensor]:
            found = []
            for i, tensor in enumerate(tensors):
                mine = (
                    tensor.narrow(axis, 0, 0)
                    if self.participants.is_understudy
                    else tensor
                )
                parts = self.workers.all_gather(mine, axis % mine.dim(), point)
                before = sum(part.shape[axis] for part in parts[: self.workers.index])
                starts[i] = [before + start for start in starts[i]]
                found.append(torch.cat(parts, axis))
            return found

        outputs, wants_grad, known = self._exchange(
            f"{name}(axis={axis})",
            tensors,
            join,
            gather_over_workers,
            names,
            check,
            starts,
        )
        shapes = [tensor.shape for tensor in tensors]

        def cut(totals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if self.participants.is_understudy:
                return [
                    total.new_zeros(shape)
                    for total, shape in zip(totals, shapes, strict=True)
                ]
            position = self.participants.present.index(self.replica.index)
            parts = zip(totals, known, shapes, strict=True)
            return [
                total.narrow(axis, start[position], shape[axis])
                for total, start, shape in parts
            ]

        return self._differentiable(tensors, outputs, cut) if wants_grad else outputs

    def scaled_sum(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of the replicas' gradients, scaled for this replica.

        Each gradient is multiplied by its replica's weight over the weight of this
        replica.
        """
        # With equal weights, this is a plain sum in one worker. Several know no weight
        # that is the greatest of all.
        unit = max(self.participants.weights) if self.workers.count == 1 else 1.0
        factor = self.weight / unit
        # A half gradient times a small factor has few bits left: in all replicas,
        # halves are sent as float32.
        is_plain = self.workers.count == 1 and all(
            weight == unit for weight in self.participants.weights
        )
        wide = [
            g if is_plain or g.dtype is not torch.float16 else g.float() for g in grads
        ]

        def scale(
            tensors: Sequence[torch.Tensor], by: Callable[..., torch.Tensor]
        ) -> Sequence[torch.Tensor]:
            # The replica may bring NaN, and 0 * NaN is NaN: its gradient is left out,
            # and it gets none.
            if not factor:
                return [torch.zeros_like(tensor) for tensor in tensors]
            # What autograd brings for an integer stays one, or it would not fit that of
            # a replica with another factor.
            return (
                tensors
                if factor == 1
                else [by(tensor, factor).to(tensor.dtype) for tensor in tensors]
            )

        brought = scale(wide, torch.mul)
        totals = self._exchange(
            "the backward of a collective",
            brought,
            self._sum_columns,
            self._add_over_workers,
        )[0]
        return [
            total.to(own.dtype)
            for total, own in zip(scale(totals, torch.div), grads, strict=True)
        ]

    def _sum_columns(self, r: int, columns: _Columns) -> list[torch.Tensor]:
        device = self.devices[r]
        if device is not None and not self.bytes_per_pack:
            return sum_each_on(columns, device)
        return combine_in_buckets(
            columns,
            self.bytes_per_pack,
            lambda column: sum_on(column, self._device_for(r, column)),
        )

    def _add_over_workers(
        self, totals: Sequence[torch.Tensor], name: str
    ) -> list[torch.Tensor]:
        # See Note [Why a worker without rows runs the step] in `participants`.
        if self.participants.is_understudy:
            totals = [torch.zeros_like(total) for total in totals]
        return self.workers.all_reduce(totals, name)

    def _device_for(self, r: int, column: Sequence[torch.Tensor]) -> Device:
        device = self.devices[r]
        # The single replica on the user's own objects has no device of its own: it runs
        # where its tensors are.
        return column[0].device if device is None else memory_device(device)

    def _exchange(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        join: Callable[[int, _Columns], list[torch.Tensor]],
        over_workers: Callable[[Sequence[torch.Tensor], str], list[torch.Tensor]],
        names: Sequence[str] = (),
        check: Callable[[Sequence[torch.Tensor]], None] = check_addable,
        told: Sequence[Any] = (),
    ) -> tuple[list[torch.Tensor], bool, Sequence[Any]]:
        """One synchronization point: the replicas' tensors become one for all of them.

        Args:
            name: The name of the synchronization point.
            tensors: Those that this replica brings.
            join: Makes, on the device of a replica, one tensor of each column.
            over_workers: Makes, of what each worker has joined, one tensor for all
                workers.
            names: The name of each tensor.
            check: Raises an error for a column that does not fit together.
            told: A list that these functions may fill. All replicas get that of the
                replica whose `combine` ran.

        Returns:
            The joined tensors on this replica's device; whether any replica wants
            gradients; and the list. The output of one replica depends on the inputs of
            all replicas. So all of them take part in the backward, or none.
        """

        present = self.participants.present

        def combine(
            brought: Sequence[tuple[list[torch.Tensor], bool, list[str]]],
        ) -> list[Tree]:
            # Tensors are matched by their positions, so without this check, a step
            # would add up tensors that have nothing to do with each other.
            names_of_first = brought[0][2]
            with refusing():
                for r, (_, _, other) in zip(present, brought, strict=True):
                    if other != names_of_first:
                        raise _unlike_structure_error(
                            name, {present[0]: names_of_first, r: other}
                        )
                columns = list(
                    zip(*(tensors for tensors, _, _ in brought), strict=True)
                )
                for column in columns:
                    check(column)
            wants_grad = any(wants for _, wants, _ in brought)
            if self.workers.count > 1:
                # A call that a step of one worker has refused, and caught, is one call
                # here, too.
                self.workers.compare(
                    "the number of this call in the step:", self.replica.num_calls
                )
                self.workers.compare(
                    "the parts of the value:", ", ".join(names_of_first)
                )
                wants_grad = any(
                    map(any, self.workers.all_gather_bytes(bytes([wants_grad]), name))
                )
                of_worker = join(present[0], columns)
                columns = [(one,) for one in over_workers(of_worker, name)]
            # Each device joins them once. Other replicas on it get copies, since a
            # replica may write on its result.
            made: dict[Device | None, list[torch.Tensor]] = {}
            answers: list[Tree] = []
            for r in present:
                known = made.get(self.devices[r])
                result = (
                    join(r, columns)
                    if known is None
                    else [tensor.clone() for tensor in known]
                )
                made[self.devices[r]] = result
                answers.append((result, wants_grad, told))
            return answers

        # Detached, so that no graph of one replica leads into that of another: a
        # backward of its own, which is another synchronization point, takes gradients
        # from replica to replica.
        wants_grad = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors
        )
        brought = ([tensor.detach() for tensor in tensors], wants_grad, list(names))
        answer: tuple[list[torch.Tensor], bool, Sequence[Any]] = (
            self.replica.synchronize(name, combine, brought)
        )
        return answer

    def _differentiable(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        cut: _Cut = tuple,
    ) -> list[torch.Tensor]:
        here = self._device_for(self.replica.index, inputs)
        # The outputs have to require grad also if only the inputs of another replica
        # do. An additional input that requires grad makes them so.
        gate = torch.ones((), device=here, requires_grad=True)
        # The gradients come back to this device; from here, autograd copies each to the
        # device of the step's tensor.
        return list(
            _apply_backward(
                self, cut, outputs, gate, *(tensor.to(here) for tensor in inputs)
            )
        )


class _Backward(torch.autograd.Function):
    """Gives outputs that were computed at a synchronization point their backward.

    The backward is another synchronization point.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: ReplicaGroup,
        cut: _Cut,
        outputs: Sequence[torch.Tensor],
        gate: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.cut = group, cut
        ctx.mark_non_differentiable(
            *(o for o in outputs if not (o.is_floating_point() or o.is_complex()))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, None, None, *ctx.cut(_apply_scaled(ctx.group, *grads)))


class _Scaled(torch.autograd.Function):
    """The sum of the replicas' gradients, as `ReplicaGroup.scaled_sum` makes it.

    You can differentiate it again, for a double backward.
    """

    @staticmethod
    def forward(
        ctx: Any, group: ReplicaGroup, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(group.scaled_sum(grads))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The forward multiplied the gradient from j to i by w_j / w_i, so its backward
        # has this factor, too. And it has the factor w_i / w_j, as has any gradient
        # that goes from i to j. The product is 1: a plain sum.
        return (None, *ctx.group.all_reduce(grads))


# `torch.compile` cannot trace the queues and threads of a synchronization point. The
# backward functions are listed, too, since a compiled step also runs its backward.
for _point in (
    ReplicaGroup.all_reduce,
    ReplicaGroup.all_gather,
    _Backward.backward,
    _Scaled.backward,
):
    hide_from_compiler(_point)
del _point

_apply_backward: Callable[..., Any] = _Backward.apply
_apply_scaled: Callable[..., Any] = _Scaled.apply


def _unlike_structure_error(name: str, names: dict[int, Sequence[str]]) -> ValueError:
    """The error for replicas that brought other names to one synchronization point."""
    (first, second), (one, other) = names, map(_list_names, names.values())
    return ValueError(
        f"Replicas {first} and {second} brought values of different structure to one "
        f"{name}: one has {one}, the other {other}."
    )


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(name or "a bare value" for name in names) or "nothing"


# The group of a single replica that uses the user's own objects. It has no state, so
# one serves all of them, and nobody asks for its device.
ALONE = ReplicaGroup(
    InlineReplica(0, torch.device("cpu", 0)),
    Participants((0,), (1.0,), ReduceOp.SUM),
    (None,),
)


def group_here(what: str) -> ReplicaGroup | None:
    """The group of the replica that the caller is in, for a call of `what`.

    In the cross-replica context, it is None.

    Raises:
        RuntimeError: If the replica cannot synchronize with others: it was entered by
            hand, or has ended.
    """
    context = current_replica_context()
    if context is None:
        return None
    group = context._require_active(what)
    assert isinstance(group, ReplicaGroup)
    return group
