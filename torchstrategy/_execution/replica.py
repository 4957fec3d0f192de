"""One replica of one run: it can synchronize with the others.

At a synchronization point, every replica brings a value and gets a result. When all replicas are there, the function
`combine` runs once, on the thread that called `run`, while all replicas stand still. `merge_call`, `all_reduce` and
`optimizer.step` are synchronization points.

The all-reduce and all-gather of a `ReplicaGroup` are differentiable. Replica i has the weight w_i. The parameters get
the sum, over all replicas, of w_i times the gradient in replica i. So a gradient in replica i has to be the gradient of
the whole step, divided by w_i. Where the output of replica j depends on the input of replica i, the gradient of that
output is therefore multiplied by w_j / w_i on its way to replica i. With equal weights, and for SUM, this is a plain
sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, final

import torch

from torchstrategy._communication.reductions import check_addable, check_gatherable
from torchstrategy._communication.transfer import added, concatenated, in_buckets, sums
from torchstrategy._communication.workers import LONE, Workers
from torchstrategy._core.context import current_replica_context, in_use, nowhere
from torchstrategy._core.devices import memory_device
from torchstrategy._core.distributed_values import ABSENT, regroup, regroup_in_worker
from torchstrategy._core.torch_internals import hide_from_compiler
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import held, reached

# The function of a synchronization point: it takes the values that the replicas brought and returns their results.
# Both are in replica order.
Combine = Callable[[Sequence[Tree]], Sequence[Tree]]


class ReplicaStopped(BaseException):
    """Stops a replica because another one failed.

    It is not an `Exception`, so that a step with `except Exception` does not catch it and go on.
    """


class Watch(Protocol):
    """An observer, which is called on the thread that called `run`, whenever a replica goes on or stands still.

    Attributes:
        take_turns: Whether the replicas should run one at a time, whichever devices they are on.
    """

    take_turns: bool

    def look(self, running: Collection[int]) -> None:
        """Called with the replicas that may have run since the last call.

        With none at the start of the run, and after a synchronization point.
        """


@dataclass(eq=False)
class Replica(ABC):
    """One replica of one run.

    Args:
        index: The id of the replica.
        device: The device on which it runs.
    """

    index: int
    device: Device
    was_asked = False  # whether the step asked which replica it is in
    # Told of each synchronization point, before its `combine` runs. None: there is nobody to tell, in other processes.
    telling: Callable[[str], None] | None = field(default=None, init=False)

    @abstractmethod
    def synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        """Waits until every replica of the run is at this synchronization point, and returns this replica's result.

        Args:
            name: The name of the synchronization point, as the user would write it: `"optimizer.step()"`.
            combine: Called once, on the thread that called `run`. Of the replicas' functions, that of the lowest
                replica is called.
            brought: The value that this replica brings.

        Raises:
            RuntimeError: From `run`, if the replicas are at different synchronization points, or some have ended.
        """

    def _told(self, name: str, combine: Combine) -> Combine:
        """The same function, which tells other processes that the replicas are at this synchronization point."""
        telling = self.telling
        assert telling is not None

        def told(brought: Sequence[Tree]) -> Sequence[Tree]:
            telling(name)
            return combine(brought)

        return told

    @abstractmethod
    def pause(self) -> None:
        """Stands still until it is this replica's turn again, which may be at once."""


@final
@dataclass(eq=False)
class InlineReplica(Replica):
    """The only replica of a run, on the caller's thread. It is alone at its synchronization points.

    Args:
        callers_device: The default device of the caller, in which `combine` runs. None: that of the replica.
    """

    callers_device: Device | None = None
    # The block in which `combine` runs: where the replica has a random stream of its own, with the caller's.
    combining: Callable[[], AbstractContextManager[None]] = nullcontext

    def pause(self) -> None:
        pass  # no other replica could go on meanwhile

    def synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        reached(self.index, name)
        held(name)
        # With several replicas, `combine` runs on the caller's thread, outside of all replicas. Here the replica is on
        # the caller's thread, so its frame and its default device have to be put aside for a while.
        # See Note [Who may call what on which thread].
        with nowhere(), in_use(self.callers_device), self.combining(), traced("synchronize at {}", name):
            known = combine if self.telling is None else self._told(name, combine)
            return known([brought])[0]


_Columns = list[tuple[torch.Tensor, ...]]  # for each tensor, the tensors of the replicas, in replica order
_Cut = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]  # from the gradients of outputs to those of inputs


@final
@dataclass(eq=False)
class ReplicaGroup:
    """Lets a replica synchronize with the others. The strategy makes one for each replica and each call of the step.

    Args:
        replica: This replica.
        present: The replicas of the run, in order.
        weights: The weight of the gradient of each replica of the strategy.
        devices: The device of each replica of the strategy. None: the device of the tensors that it brings.
        workers: The processes that train together. `present`, `weights` and `devices` are of this one.
        num_present: How many replicas of all workers are in the run. None: those of this one.
        weight_of_all: What the gradient of something that is the same in every replica is multiplied by. None: the sum
            of `weights`.
        is_understudy: Whether what this worker brings does not count: it has no rows.
        bytes_per_pack: How many bytes are sent together at most. 0: each tensor is sent by itself.
    """

    replica: Replica
    present: Sequence[int]
    weights: Sequence[float]
    devices: Sequence[Device | None]
    workers: Workers = LONE
    num_present: int | None = None
    weight_of_all: float | None = None
    is_understudy: bool = False
    bytes_per_pack: int = 0

    @property
    def size(self) -> int:
        """How many replicas of all workers are in the run."""
        return len(self.present) if self.num_present is None else self.num_present

    @property
    def total_weight(self) -> float:
        """What the gradient of something that is the same in every replica is multiplied by."""
        return sum(self.weights) if self.weight_of_all is None else self.weight_of_all

    def in_buckets(self, bytes_per_pack: int) -> ReplicaGroup:
        """The same group, which sends tensors in buckets of at most `bytes_per_pack`."""
        return replace(self, bytes_per_pack=bytes_per_pack)

    def regroup(self, brought: Sequence[Tree]) -> Tree:
        """One tree of the trees that the replicas of this run brought."""
        # Replicas that take no part in this run count, too, since a distributed value has a component for each replica
        # of the strategy.
        by_replica: list[Tree] = [ABSENT] * len(self.devices)
        for r, tree in zip(self.present, brought, strict=True):
            by_replica[r] = tree
        if self.workers.count > 1:
            return regroup_in_worker(by_replica, is_understudy=self.is_understudy)
        return regroup(by_replica)

    @property
    def weight(self) -> float:
        """The factor of this replica's gradient; 0 if the gradient is dropped."""
        return self.weights[self.replica.index]

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str] = (), name: str = "all_reduce"
    ) -> list[torch.Tensor]:
        """The sums of the replicas' tensors, tensor by tensor, on this replica's device.

        Args:
            tensors: The tensors of this replica.
            names: The name of each tensor, the same in every replica.
            name: The name of the synchronization point.

        Raises:
            ValueError: From `run`, if the shapes or dtypes of what they bring differ.
        """
        # Each device adds the tensors up once. Other replicas on the device get copies, since a replica may write on
        # its result.
        made: dict[Device | None, list[torch.Tensor]] = {}

        def given(r: int, columns: _Columns) -> list[torch.Tensor]:
            if (device := self.devices[r]) in made:
                return [total.clone() for total in made[device]]
            made[device] = self._sums(r, columns)
            return made[device]

        def over_workers(columns: _Columns) -> _Columns:
            return self._added_over_workers(columns, [1.0] * len(self.present), name)

        outputs, wants_grad = self._exchange(name, tensors, given, names, over_workers)
        return self._differentiable(tensors, outputs) if wants_grad else outputs

    def all_gather(
        self, tensors: Sequence[torch.Tensor], axis: int, names: Sequence[str] = (), name: str = "all_gather"
    ) -> list[torch.Tensor]:
        """The tensors of all replicas, concatenated along `axis` in replica order, on this replica's device.

        Args:
            tensors: The tensors of this replica.
            axis: The dimension along which they are concatenated.
            names: The name of each tensor, the same in every replica.
            name: The name of the synchronization point.

        Raises:
            ValueError: From `run`, if they differ in another dimension, in rank or in dtype.
        """

        # For each tensor: how much the workers before this one bring along the axis, and how much each replica brings.
        lengths: list[tuple[int, list[int]]] = []

        def over_workers(columns: _Columns) -> _Columns:
            joined: _Columns = []
            for column in columns:
                mine = concatenated(column, axis, self._where(self.present[0], column))
                mine = mine.narrow(axis, 0, 0) if self.is_understudy else mine
                parts = self.workers.all_gather(mine, axis % mine.dim(), f"{name}(axis={axis})")
                before = sum(part.shape[axis] for part in parts[: self.workers.index])
                lengths.append((before, [tensor.shape[axis] for tensor in column]))
                joined.append((torch.cat(parts, axis),))
            return joined

        def gathered(r: int, columns: _Columns) -> list[tuple[torch.Tensor, tuple[int, list[int]]]]:
            there = zip(*(self._sent(tensors, r) for tensors in zip(*columns, strict=True)), strict=True)
            joined = [concatenated(column, axis, self._where(r, column)) for column in there]
            known = lengths or [(0, [t.shape[axis] for t in column]) for column in columns]
            return list(zip(joined, known, strict=True))

        fits = partial(check_gatherable, axis=axis)
        pairs, wants_grad = self._exchange(f"{name}(axis={axis})", tensors, gathered, names, over_workers, fits)
        outputs, known = [output for output, _ in pairs], [length for _, length in pairs]
        shapes = [tensor.shape for tensor in tensors]

        def cut(totals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if self.is_understudy:
                return [total.new_zeros(shape) for total, shape in zip(totals, shapes, strict=True)]
            position = self.present.index(self.replica.index)
            return [
                total.narrow(axis, before + sum(sizes[:position]), sizes[position])
                for total, (before, sizes) in zip(totals, known, strict=True)
            ]

        return self._differentiable(tensors, outputs, cut) if wants_grad else outputs

    def scaled_sum(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of the replicas' gradients, each multiplied by its replica's weight over that of this replica."""

        name = "the backward of a collective"

        def sums(r: int, columns: _Columns) -> list[torch.Tensor]:
            if self.workers.count > 1:
                weight = self.weights[r]
                return [total / weight if weight else torch.zeros_like(total) for (total,) in columns]
            return in_buckets(columns, self.bytes_per_pack, lambda column: self._scaled_sum_for(r, column))

        def over_workers(columns: _Columns) -> _Columns:
            return self._added_over_workers(columns, [self.weights[r] for r in self.present], name)

        return self._exchange(name, grads, sums, over_workers=over_workers)[0]

    def _added_over_workers(self, columns: _Columns, weights: Sequence[float], name: str) -> _Columns:
        """The weighted sums over the replicas of all workers, in the place of what those of this worker brought."""
        totals = []
        for column in columns:
            counted = [] if self.is_understudy else zip(column, weights, strict=True)
            terms = [t if w == 1 else t * w for t, w in counted if w]
            where = self._where(self.present[0], column)
            totals.append(added(terms, where) if terms else torch.zeros_like(column[0], device=where))
        return [(total,) for total in self.workers.all_reduce(totals, name)]

    def _sums(self, r: int, columns: _Columns) -> list[torch.Tensor]:
        device = self.devices[r]
        if device is not None and not self.bytes_per_pack:
            return sums(columns, device)
        return in_buckets(columns, self.bytes_per_pack, lambda column: added(column, self._where(r, column)))

    def _scaled_sum_for(self, r: int, column: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self.weights[r]:
            return torch.zeros_like(column[self.present.index(r)])  # this replica's gradient will be dropped
        ratios = [self.weights[j] / self.weights[r] for j in self.present]
        # A replica of weight 0 may bring NaN, and 0 * NaN is NaN. So its gradient is left out.
        terms = [t if ratio == 1 else t * ratio for t, ratio in zip(column, ratios, strict=True) if ratio]
        return added(terms, self._where(r, column))

    def _where(self, r: int, column: Sequence[torch.Tensor]) -> Device:
        device = self.devices[r]
        # The single replica on the user's own objects has no device of its own: it runs where its tensors are.
        return column[0].device if device is None else device

    def _sent(self, tensors: Sequence[torch.Tensor], r: int) -> list[torch.Tensor]:
        """The tensors of one replica, on the device of replica `r`."""
        columns = [[tensor] for tensor in tensors]
        return in_buckets(
            columns, self.bytes_per_pack, lambda column: column[0].to(memory_device(self._where(r, column)))
        )

    def _exchange(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        given: Callable[[int, _Columns], list[Any]],
        names: Sequence[str] = (),
        over_workers: Callable[[_Columns], _Columns] = list,
        check: Callable[[Sequence[torch.Tensor]], None] = check_addable,
    ) -> tuple[list[Any], bool]:
        """One synchronization point: `given` makes, for each replica, a result of the tensors that all replicas bring.

        `check` raises an error for a column that does not fit together.

        Returns:
            The result of this replica, and whether any replica wants gradients. The output of one replica depends on
            the inputs of all replicas. So all of them take part in the backward, or none.
        """

        def combine(brought: Sequence[tuple[list[torch.Tensor], bool, list[str]]]) -> list[tuple[list[Any], bool]]:
            # Tensors are matched by their positions, so without this check, a step would add up tensors that have
            # nothing to do with each other.
            for r, (_, _, other) in zip(self.present, brought, strict=True):
                if other != brought[0][2]:
                    raise ValueError(
                        f"Replicas {self.present[0]} and {r} brought values of different structure to one {name}: one "
                        f"has {_listed(brought[0][2])}, the other {_listed(other)}."
                    )
            columns = list(zip(*(tensors for tensors, _, _ in brought), strict=True))
            for column in columns:
                check(column)
            wants_grad = any(wants for _, wants, _ in brought)
            if self.workers.count > 1:
                wants_grad = any(self.workers.all_gather_object(wants_grad, name))
                columns = over_workers(columns)
            return [(given(r, columns), wants_grad) for r in self.present]

        # Detached, so that no graph of one replica leads into that of another: a backward of its own, which is another
        # synchronization point, takes gradients from replica to replica.
        wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        brought = ([tensor.detach() for tensor in tensors], wants_grad, list(names))
        answer: tuple[list[Any], bool] = self.replica.synchronize(name, combine, brought)
        return answer

    def _differentiable(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], cut: _Cut = tuple
    ) -> list[torch.Tensor]:
        here = memory_device(self._where(self.replica.index, inputs))
        # The outputs have to require grad also if only the inputs of another replica do. An additional input that
        # requires grad makes them so.
        gate = torch.ones((), device=here, requires_grad=True)
        # The gradients come back to this device; from here, autograd copies each to the device of the step's tensor.
        return list(_apply_backward(self, cut, outputs, gate, *(tensor.to(here) for tensor in inputs)))


class _Backward(torch.autograd.Function):
    """Gives outputs that were computed at a synchronization point their backward: another synchronization point."""

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
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, None, None, *ctx.cut(_apply_scaled(ctx.group, *grads)))


class _Scaled(torch.autograd.Function):
    """The sum of the replicas' gradients, as `ReplicaGroup.scaled_sum` makes it; differentiable for double backward."""

    @staticmethod
    def forward(ctx: Any, group: ReplicaGroup, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(group.scaled_sum(grads))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The forward multiplied the gradient from j to i by w_j / w_i, so its backward has this factor, too. And it has
        # the factor w_i / w_j, as has any gradient that goes from i to j. The product is 1: a plain sum.
        return (None, *ctx.group.all_reduce(grads))


# `torch.compile` cannot trace the queues and threads of a synchronization point. The backward functions are listed,
# too, since a compiled step also runs its backward.
for _point in (ReplicaGroup.all_reduce, ReplicaGroup.all_gather, _Backward.backward, _Scaled.backward):
    hide_from_compiler(_point)
del _point

_apply_backward: Callable[..., Any] = _Backward.apply
_apply_scaled: Callable[..., Any] = _Scaled.apply


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "a bare value" for name in names) or "nothing"


# The group of a single replica that uses the user's own objects. It has no state, so one serves all of them, and nobody
# asks for its device.
ALONE = ReplicaGroup(InlineReplica(0, torch.device("cpu", 0)), (0,), (1.0,), (None,))


def group_here(what: str) -> ReplicaGroup | None:
    """The group of the replica that the caller is in, for a call of `what`; None in the cross-replica context.

    Raises:
        RuntimeError: If the replica cannot synchronize with others: it was entered by hand, or has ended.
    """
    context = current_replica_context()
    if context is None:
        return None
    group = context._require_active(what)
    assert isinstance(group, ReplicaGroup)
    return group
