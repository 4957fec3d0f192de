"""Several replicas, in one process or in several workers, and the story of a step in them."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, final

import torch

from torchstrategy._communication.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from torchstrategy._communication.options import USUAL_OPTIONS, CommunicationOptions
from torchstrategy._communication.reductions import as_axis, as_tensor, combined, gathered
from torchstrategy._core.context import Frame
from torchstrategy._core.distributed_values import (
    ABSENT,
    DistributedValues,
    Mirrored,
    PerReplica,
    check_component_counts,
    for_understudy,
    regroup,
    regroup_in_worker,
    select,
)
from torchstrategy._core.options import ReduceOp, RunOptions
from torchstrategy._core.trace import traced
from torchstrategy._core.tree import tree_flatten, tree_leaves
from torchstrategy._core.types import Device, ReplicaFn, Tree
from torchstrategy._execution.replica import Replica, ReplicaGroup
from torchstrategy._execution.replica_threads import Replicas
from torchstrategy._replication.replicated_run import ReplicatedRun
from torchstrategy._replication.storage import ReplicatedStorage, Storage
from torchstrategy._strategy.one_machine import OneMachineExtended, gathered_alone
from torchstrategy._strategy.replica_context import running_context
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._training.replica_weights import ReplicaWeights
from torchstrategy._variables.kinds import MirroredVariable

_ON_ONE_DEVICE = ReductionToOneDevice()


@final
class ReplicatedExtended(OneMachineExtended):
    """Several replicas, or a single one. Each gets its part of a batch, and their results are put together.

    Args:
        storage: Where parameters live, and on which devices replicas run.
        gradient_reduction: How the gradients of the replicas become one, where a run does not say.
        between_graph: The value of `extended.experimental_between_graph`, which changes nothing here.
        cross_device_ops: How `reduce` and the like bring values together on the parameter device.
    """

    _makes_containers = True

    def __init__(
        self,
        storage: Storage,
        gradient_reduction: ReduceOp,
        between_graph: bool = False,
        cross_device_ops: CrossDeviceOps = _ON_ONE_DEVICE,
    ) -> None:
        super().__init__(storage, between_graph)
        self._workers = workers = storage.layout.workers
        self._cross_device_ops = cross_device_ops
        self._replicas = Replicas(storage.devices, workers.index * len(storage.devices))
        self._streams = storage.layout.streams
        self._gradient_reduction = gradient_reduction
        self._is_running = False  # whether a run is under way, where there are several workers

    # Note [The story of a step]
    # 1. Compute the weights: how much each replica counts follows from its rows, or from `RunOptions`
    #    (`_training/replica_weights`).
    # 2. Begin the run: each replica gets copies that have the user's latest values. Where the step says `model`, it
    #    gets the copy of its replica (`_replication/storage`; Note [The order of a run and of its undoing]
    #    there tells what undoes it).
    # 3. Call the step in each replica: on this thread, and on threads of their own where replicas have to wait for one
    #    another (`_execution/replica_threads`).
    # 4. Synchronize: at `optimizer.step()`, `all_reduce` and the like all replicas stand still while one function runs
    #    for them on this thread. At `optimizer.step()` gradients become one (`_training/gradient_reducer`).
    # 5. Regroup: what the replicas returned becomes one result (`_core/distributed_values`).
    # 6. End the run: what the step has changed in its copies comes to the user's own objects. If the changes of the
    #    replicas do not fit together, the run raises an error and is undone.
    # A strategy with a plain `Storage` has nothing of this to do: it calls the step with the user's own objects.
    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        if not callable(fn):
            raise TypeError(f"Strategy.run calls its first argument in each replica; {fn!r} cannot be called.")
        if not isinstance(self._storage, ReplicatedStorage):
            return super()._run(fn, args, kwargs, options)
        if self._workers.count == 1:
            return self._run_together(fn, args, kwargs, options)
        if self._is_running:
            raise RuntimeError(
                "strategy.run was called in a merge function, or on a second thread, while a run of the same strategy "
                "was under way. Several workers could not tell which of the two runs an exchange belongs to. Call run "
                "after the other one has returned."
            )
        self._is_running = True
        self._workers.begin_run()
        try:
            with self._telling_others():
                return self._run_together(fn, args, kwargs, options)
        finally:
            self._is_running = False

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """A block in which the workers exchange values: if it fails here, the others are told why."""
        try:
            yield
        except BaseException as error:
            self._workers.failed(error)
            raise

    def _run_together(
        self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions
    ) -> Tree:
        strategy, count = self._container_strategy(), len(self._storage.devices)
        leaves = tree_leaves((args, kwargs))
        check_component_counts(leaves, count)
        storage = self._storage
        assert isinstance(storage, ReplicatedStorage)
        weights = self._weights(storage, leaves, options)
        uncounted = storage.as_before() if weights.is_understudy else nullcontext()
        with storage.begin_run(weights, fn, leaves, lambda: Frame(strategy)) as run_state, uncounted:

            def call(replica: Replica) -> Tree:
                given = for_understudy((args, kwargs)) if weights.is_understudy else (args, kwargs)
                own_args, own_kwargs = select(given, replica.index)
                group = ReplicaGroup(
                    replica,
                    weights.present,
                    weights.weights,
                    storage.devices,
                    workers=self._workers,
                    num_present=weights.num_present,
                    weight_of_all=weights.total_weight,
                    is_understudy=weights.is_understudy,
                )
                context = running_context(strategy, group, run_state.published)
                with (
                    traced("run {} [replica {}]", fn, replica.index),
                    Frame(strategy, context, run_state.local_objects(replica)),
                ):
                    try:
                        result = fn(*own_args, **own_kwargs)
                        if isinstance(result, (Generator, Coroutine)):
                            result.close()
                            raise TypeError(_NOT_RUN.format(type(result).__name__))
                        run_state.copies.gradients.accumulate(replica.index)
                        return result
                    finally:
                        context._ends()

            # With several workers, a replica draws random numbers from the stream of its number among all replicas.
            drawing = call if self._streams is None else self._streams.around(call)
            results = self._replicas.run(drawing, weights.present, run_state.watch)
            if self._streams is not None:
                self._workers.arrive("the end of strategy.run")
                self._streams.has_drawn |= self._replicas.has_drawn
                self._streams.has_drawn &= not weights.is_understudy
            result = self._put_together(results, run_state, weights)
        run_state.warn()
        return result

    def _put_together(self, results: Mapping[int, Tree], run_state: ReplicatedRun, weights: ReplicaWeights) -> Tree:
        """Makes one tree of those that the replicas of this worker have returned."""
        if any(_may_require_grad(leaf) for leaf in tree_leaves(list(results.values()))):
            run_state.copies.gradients.deliver_late_ones()
        by_replica = [results.get(r, ABSENT) for r in range(len(self._storage.devices))]
        if self._workers.count > 1:
            return regroup_in_worker(by_replica, is_understudy=weights.is_understudy, are_results=True)
        return regroup(by_replica, are_results=True)

    def _weights(self, storage: ReplicatedStorage, leaves: Sequence[Tree], options: RunOptions) -> ReplicaWeights:
        """How much each replica counts. Where there are several workers, they tell each other their rows."""
        known = leaves, len(storage.devices), options, self._gradient_reduction
        if self._streams is None:
            return ReplicaWeights.of(*known)
        weights = ReplicaWeights.of(*known, self._workers, self._streams.begin(), storage.has_news)
        if not weights.streams_agree:
            self._streams.follow()
        return weights

    @property
    def _num_local(self) -> int:
        return len(self._storage.devices)

    def _device_of(self, replica: int) -> Device:
        return super()._device_of(replica % self._num_local)  # all workers have the same number of replicas

    def _first_of(self, value: Tree) -> Tree:
        if self._workers.count == 1:
            return super()._first_of(value)
        (own, *_), matters = self._parts_of(value)
        told = (matters, own.cpu() if isinstance(own, torch.Tensor) else own)
        with self._telling_others():
            of_all = self._workers.all_gather_object(told, "the assignment of a variable")
        return next((value for matters, value in of_all if matters), own)

    def _over_workers(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...] | None) -> torch.Tensor:
        with self._telling_others():
            values, matter = self._parts_of(value)
            return combined(op, values, axis, self._storage.parameter_device, self._workers, matter)

    def _parts_of(self, value: Tree) -> tuple[Sequence[Tree], bool]:
        """What this worker has of a value, and whether it counts. A plain value is the same in every replica.

        If no replica of this worker is present, it brings a value that only tells the shape and dtype.
        """
        if not isinstance(value, DistributedValues):
            return [value] * self._num_local, True
        return value.values or [getattr(value, "understudy", None)], bool(value.values)

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        if isinstance(value, (Mirrored, MirroredVariable)) and op is ReduceOp.MEAN:
            return value.values[0]
        if isinstance(value, DistributedValues):
            check_component_counts([value], self._num_local)
            if self._workers.count > 1:
                return self._over_workers(op, value, None)
            return _as_mean(op, value, self._cross_device_ops.reduce(op, *self._on_parameter_device(value)))
        if op is ReduceOp.MEAN or (isinstance(value, (int, float)) and value == 0):
            return value
        if self._num_replicas_in_sync > 1:
            raise ValueError(
                f"A value that is not distributed, {value!r}, cannot be summed over {self._num_replicas_in_sync} "
                "replicas: it is not known whether each of them has it. Return it from strategy.run, or multiply it."
            )
        return as_tensor(value).clone()

    def _reduce_leaves(self, op: ReduceOp, value: Tree) -> Tree:
        leaves, spec = tree_flatten(value)
        if self._workers.count == 1 and len(leaves) > 1 and all(map(_holds_tensors, leaves)):
            with suppress(TypeError, ValueError):  # the value that does not fit is named below
                return spec.unflatten(self._reduce_all(op, leaves, USUAL_OPTIONS))
        return super()._reduce_leaves(op, value)

    def _reduce_all(self, op: ReduceOp, leaves: Sequence[Tree], options: CommunicationOptions) -> list[Tree]:
        if self._workers.count > 1:
            return super()._reduce_all(op, leaves, options)
        together = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PerReplica)]
        check_component_counts(leaves, self._num_replicas_in_sync)
        pairs = [self._on_parameter_device(leaves[i]) for i in together]
        totals = self._cross_device_ops.batch_reduce(op, pairs, options)
        reduced = {i: _as_mean(op, leaves[i], total) for i, total in zip(together, totals, strict=True)}
        return [reduced[i] if i in reduced else self._reduce(op, leaf) for i, leaf in enumerate(leaves)]

    def _on_parameter_device(self, value: DistributedValues) -> tuple[PerReplica, Device]:
        # Outside of replicas a variable acts as one tensor. Its values for the replicas are what is reduced.
        plain = value if isinstance(value, PerReplica) else PerReplica(value.values)
        return plain, self._storage.parameter_device

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        check_component_counts([value], self._num_local)
        return self._over_workers(op, value, axis)

    def _gather(self, value: Tree, axis: int) -> Tree:
        if not isinstance(value, DistributedValues):
            return gathered_alone(value, axis) if self._num_replicas_in_sync == 1 else value
        check_component_counts([value], self._num_local)
        with self._telling_others():
            values, matter = self._parts_of(value)
            return gathered(values, as_axis(axis), self._storage.parameter_device, self._workers, matter)

    def _copy(self, memo: dict[int, Any]) -> StrategyExtended:
        if self._workers.count > 1:
            raise TypeError(
                "A strategy of several processes cannot be copied: the copy's exchanges would have no order."
            )
        settings = self._gradient_reduction, self._between_graph, self._cross_device_ops
        return ReplicatedExtended(type(self._storage)(self._storage.layout), *settings)


def _holds_tensors(value: Tree) -> bool:
    return type(value) is PerReplica and all(isinstance(component, torch.Tensor) for component in value.values)


def _as_mean(op: ReduceOp, value: DistributedValues, reduced: Tree) -> Tree:
    """The result of a reduction. The mean of integers is of torch's default dtype, also if one replica was present."""
    return reduced / 1 if op is ReduceOp.MEAN and len(value.values) == 1 else reduced


_NOT_RUN = (
    "The step is a function with yield, or an async one: its call returned a {}, and ran nothing yet. Whoever runs it "
    "later runs it on your own objects, once for each replica. Let the step do its work and return what it made."
)


def _may_require_grad(value: Tree) -> bool:
    """Whether a backward may begin at a leaf of a result: an object of the user's own may hold tensors."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return not isinstance(value, _WITHOUT_TENSORS) and torch.is_grad_enabled()


_WITHOUT_TENSORS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
