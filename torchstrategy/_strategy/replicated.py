"""Several replicas on one machine, and the story of a step in them."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from typing import Any, final

import torch

from torchstrategy._communication.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from torchstrategy._communication.options import CommunicationOptions
from torchstrategy._communication.reductions import as_axis, as_tensor, combined_along, gathered
from torchstrategy._core.context import Frame
from torchstrategy._core.distributed_values import (
    ABSENT,
    DistributedValues,
    Mirrored,
    PerReplica,
    check_component_counts,
    regroup,
    select,
)
from torchstrategy._core.options import ReduceOp, RunOptions
from torchstrategy._core.trace import traced
from torchstrategy._core.tree import tree_flatten
from torchstrategy._core.types import Device, ReplicaFn, Tree
from torchstrategy._execution.replica import Replica, ReplicaGroup
from torchstrategy._execution.replica_threads import Replicas
from torchstrategy._replication.replicated_storage import ReplicatedStorage
from torchstrategy._replication.storage import Storage
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
        between_graph: What TensorFlow says of `experimental_between_graph` under a strategy of this kind.
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
        self._cross_device_ops = cross_device_ops
        self._replicas = Replicas(storage.devices)
        self._gradient_reduction = gradient_reduction

    # Note [The story of a step]
    # 1. Weigh: how much each replica counts follows from the rows that it was given (`_training/replica_weights`).
    # 2. Begin the run: each replica gets its copies, up to date, and names in the step mean them
    #    (`_replication/replicated_storage`; Note [The order of a run and of its undoing] tells what undoes it).
    # 3. Call the step in each replica, on a thread of its own; a single replica runs on this thread
    #    (`_execution/replica_threads`).
    # 4. Synchronize: at `optimizer.step()`, `all_reduce` and the like all replicas stand still while one function runs
    #    for them on this thread. At `optimizer.step()` gradients become one (`_training/gradient_reducer`).
    # 5. Regroup: what the replicas returned becomes one result (`_core/distributed_values`).
    # 6. End the run: what the step has changed in its copies comes to the user's own objects. This may be refused, and
    #    then the run is undone.
    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        if not callable(fn):
            raise TypeError(f"Strategy.run calls its first argument in each replica; {fn!r} cannot be called.")
        if not isinstance(self._storage, ReplicatedStorage):
            return super()._run(fn, args, kwargs, options)
        strategy, count = self._container_strategy(), len(self._storage.devices)
        leaves, _ = tree_flatten((args, kwargs))
        check_component_counts(leaves, count)
        weights = ReplicaWeights.of(leaves, count, options, self._gradient_reduction)
        with self._storage.begin_run(weights, fn, leaves, lambda: Frame(strategy)) as run_state:

            def call(replica: Replica) -> Tree:
                own_args, own_kwargs = select((args, kwargs), replica.index)
                group = ReplicaGroup(replica, weights.present, weights.weights, self._storage.devices)
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
                        run_state.ends(replica)
                        return result
                    finally:
                        context._ends()

            results = self._replicas.run(call, weights.present, run_state.watch)
            if any(_may_require_grad(leaf) for leaf in tree_flatten(list(results.values()))[0]):
                run_state.results_require_grad()
            result = regroup([results.get(r, ABSENT) for r in range(count)], are_results=True)
        run_state.warn()
        return result

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        if isinstance(value, (Mirrored, MirroredVariable)) and op is ReduceOp.MEAN:
            return value.values[0]
        if isinstance(value, DistributedValues):
            check_component_counts([value], self._num_replicas_in_sync)
            return _as_mean(op, value, self._cross_device_ops.reduce(op, *self._on_parameter_device(value)))
        if op is ReduceOp.MEAN or (isinstance(value, (int, float)) and value == 0):
            return value
        if self._num_replicas_in_sync > 1:
            raise ValueError(
                f"A value that is not distributed, {value!r}, cannot be summed over {self._num_replicas_in_sync} "
                "replicas: it is not known whether each of them has it. Return it from strategy.run, or multiply it."
            )
        return as_tensor(value).clone()

    def _reduce_all(self, op: ReduceOp, leaves: Sequence[Tree], options: CommunicationOptions) -> list[Tree]:
        if not options.bytes_per_pack:
            return super()._reduce_all(op, leaves, options)
        together = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PerReplica)]
        check_component_counts(leaves, self._num_replicas_in_sync)
        pairs = [self._on_parameter_device(leaves[i]) for i in together]
        totals = self._cross_device_ops.batch_reduce(op, pairs, options)
        reduced = {i: _as_mean(op, leaves[i], total) for i, total in zip(together, totals, strict=True)}
        return [reduced[i] if i in reduced else self._reduce(op, leaf) for i, leaf in enumerate(leaves)]

    def _on_parameter_device(self, value: DistributedValues) -> tuple[PerReplica, Device]:
        # A variable is a tensor, too, and would be reduced as the one tensor that it is outside of replicas.
        return PerReplica(value.values), self._storage.parameter_device

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        check_component_counts([value], self._num_replicas_in_sync)
        # A plain value counts as the same in every replica.
        values = value.values if isinstance(value, DistributedValues) else [value] * self._num_replicas_in_sync
        return combined_along(op, values, axis, self._storage.parameter_device)

    def _gather(self, value: Tree, axis: int) -> Tree:
        if not isinstance(value, DistributedValues):
            return gathered_alone(value, axis) if self._num_replicas_in_sync == 1 else value
        check_component_counts([value], self._num_replicas_in_sync)
        return gathered(value.values, as_axis(axis), self._storage.parameter_device)

    def _copy(self, memo: dict[int, Any]) -> StrategyExtended:
        settings = self._gradient_reduction, self._between_graph, self._cross_device_ops
        return ReplicatedExtended(self._storage.like(), *settings)


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
