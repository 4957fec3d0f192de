"""The two kinds of strategies on one machine: a single replica on the user's own objects, and replicas that meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._communication.cross_device_ops.cross_device_ops import CrossDeviceOps
from torchstrategy._communication.operands import as_axis, as_tensor, check_gatherable
from torchstrategy._communication.options import CommunicationOptions, check_usable
from torchstrategy._communication.reductions import combined, combined_along, combined_in_packs, gathered
from torchstrategy._communication.transfer import sent_to
from torchstrategy._core.context import Frame, frames_of_this_thread
from torchstrategy._core.devices import canonical_device, in_use, memory_device, needs_device_context
from torchstrategy._core.distributed_values import (
    ABSENT,
    DistributedValues,
    Mirrored,
    PerReplica,
    check_component_counts,
    distributed_within,
    local_results,
    regroup,
    select,
)
from torchstrategy._core.options import NO_OPTIONS, ReduceOp, RunOptions, ValueContext
from torchstrategy._core.protocols import StrategyLike
from torchstrategy._core.trace import traced
from torchstrategy._core.tree import map_leaves, tree_flatten, unflatten_like
from torchstrategy._core.types import Device, ReplicaFn, Tree
from torchstrategy._execution.collectives import Collective
from torchstrategy._execution.instruments import performed_alone
from torchstrategy._execution.replica import Replica
from torchstrategy._execution.replica_group import ReplicaGroup
from torchstrategy._execution.replicas import Replicas
from torchstrategy._input.dataset import DatasetFn, distributed, distributed_from_function
from torchstrategy._input.options import InputContext, InputOptions, InputReplicationMode
from torchstrategy._replication.storage import InPlaceStorage, RunState, Storage, is_nobodys
from torchstrategy._strategy.replica_context import LoneFrame, running_context
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._training.replica_weights import ReplicaWeights
from torchstrategy._variables.kinds import MirroredVariable
from torchstrategy._variables.variable import Variable


class _OnOneMachine(StrategyExtended):
    """What both have in common."""

    def _local_results(self, distributed_value: Tree) -> tuple[Tree, ...]:
        return local_results(distributed_value, self._num_replicas_in_sync)

    def _reduce_to(self, reduce_op: ReduceOp, value: Tree, destinations: Any, options: CommunicationOptions) -> Tree:
        return self._reduced_to(reduce_op, [(value, destinations)], options, "reduce_to")[0]

    def _batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Tree, Any]], options: CommunicationOptions
    ) -> list[Tree]:
        return self._reduced_to(reduce_op, value_destination_pairs, options, "batch_reduce_to")

    def _reduced_to(
        self, op: ReduceOp, pairs: Sequence[tuple[Tree, Any]], options: CommunicationOptions, method: str
    ) -> list[Tree]:
        check_usable(method, options, lambda: [self._device_of(r) for r in range(self._num_replicas_in_sync)])
        leaves, spec = tree_flatten([value for value, _ in pairs])
        reduced = unflatten_like(self._reduce_all(op, leaves, options), spec)
        return [
            map_leaves(partial(_sent, destinations=where), value)
            for value, (_, where) in zip(reduced, pairs, strict=True)
        ]

    def _reduce_all(self, op: ReduceOp, leaves: Sequence[Tree], options: CommunicationOptions) -> list[Tree]:
        """The sum or mean of each of several leaves."""
        return [self._reduce(op, leaf) for leaf in leaves]

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        return _sent(tensor, destinations)


@final
class SingleExtended(_OnOneMachine):
    """One replica, on the caller's thread, on the user's own objects. Nothing is wrapped, and nothing is put together.

    Args:
        device: Where it runs. None: wherever the caller is, as outside of every strategy.
        storage: To whom modules that are created in its scope belong; None: to nobody.
    """

    def __init__(self, device: Device | None, storage: Storage | None) -> None:
        super().__init__()
        self._device = device
        self._storage = storage

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        if self._device is None:
            raise RuntimeError("The default strategy has no devices of its own: it runs wherever its caller is.")
        return (self._device,)

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        return self.worker_devices

    @property
    def experimental_between_graph(self) -> bool:
        if self._device is None:
            raise NotImplementedError("The default strategy does not say: there are no graphs, and it has no devices.")
        return False

    def non_slot_devices(self, var_list: Iterable[Any]) -> tuple[Device, ...]:
        return (self._device_of(0),)

    def variable_created_in_scope(self, v: nn.Module | torch.Tensor) -> bool:
        _require_variable(v)
        return is_nobodys(v) if self._storage is None else self._storage.owns(v)

    def _take_variable(self, variable: Variable) -> None:
        if self._storage is not None:
            self._storage.take_variable(variable)

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        if options.examples is not None:
            ReplicaWeights.of((), 1, options, ReduceOp.MEAN)  # refuses counts that do not fit
        return _run_alone(self._container_strategy(), self._device, fn, args, kwargs)

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        return _own(value)

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        tensor = as_tensor(_own(value))
        return combined_along(op, [tensor], axis, tensor.device)

    def _gather(self, value: Tree, axis: int) -> Tree:
        return _gathered_alone(_own(value), axis)

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        if self._device is None:
            raise NotImplementedError(
                "The default strategy has no devices of its own to broadcast to. Write tensor.to(device)."
            )
        return super()._broadcast_to(tensor, destinations)

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        if self._device is None:
            _refuse_input_options(options)
            return dataset
        return distributed(dataset, [self._device], options)

    def _distribute_from_function(self, dataset_fn: DatasetFn, options: InputOptions) -> Any:
        if self._device is None:
            _refuse_input_options(options)
            return dataset_fn(InputContext())
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "OneDeviceStrategy has one replica, so there is nothing to make an input pipeline for each replica "
                "for: leave out InputOptions(experimental_replication_mode=PER_REPLICA)."
            )
        return distributed_from_function(dataset_fn, [self._device], options)

    def _distribute_values(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        return value_fn(ValueContext())

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        if self._storage is None:
            return module
        self._storage.take_module(module)
        return module.to(memory_device(self._storage.parameter_device))

    def _distribute_optimizer(self, optimizer: Optimizer) -> None:
        if self._storage is not None:
            self._storage.take_optimizer(optimizer)

    def _creation_scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._storage is None else _creating_in(self._storage)

    def _device_of(self, replica: int) -> Device:
        return canonical_device(None) if self._device is None else self._device

    def _copy(self, memo: dict[int, Any]) -> StrategyExtended:
        return SingleExtended(self._device, None if self._storage is None else self._storage.like())


@final
class ReplicatedExtended(_OnOneMachine):
    """Replicas that meet: their values are put together, and a batch is dealt out to them. There may be only one.

    Args:
        replicas: Where they run.
        storage: Where parameters live.
        gradient_reduction: How the gradients of the replicas become one, where a run does not say.
        between_graph: What TensorFlow says of `experimental_between_graph` under a strategy of this kind.
        cross_device_ops: How values are reduced; None: they are sent to the parameter device, and added up there.
    """

    def __init__(
        self,
        replicas: Replicas,
        storage: Storage,
        gradient_reduction: ReduceOp,
        between_graph: bool = False,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        super().__init__()
        self._cross_device_ops = cross_device_ops
        self._between_graph = between_graph
        self._replicas = replicas
        self._storage = storage
        self._gradient_reduction = gradient_reduction

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        return self._replicas.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        return self._storage.parameter_devices

    @property
    def experimental_between_graph(self) -> bool:
        return self._between_graph

    def variable_created_in_scope(self, v: nn.Module | torch.Tensor) -> bool:
        _require_variable(v)
        return self._storage.owns(self.value_container(v))

    def _take_variable(self, variable: Variable) -> None:
        self._storage.take_variable(variable)

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._replicas.devices)

    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        if not callable(fn):
            raise TypeError(f"Strategy.run calls its first argument in each replica; {fn!r} cannot be called.")
        strategy = self._container_strategy()
        if type(self._storage) is InPlaceStorage and options is NO_OPTIONS:  # that is the storage of a lone replica
            return _run_alone(strategy, self._replicas.devices[0], fn, args, kwargs, own_containers=True)
        count = self._num_replicas_in_sync
        leaves, _ = tree_flatten((args, kwargs))
        check_component_counts(leaves, count)
        replica_weights = ReplicaWeights.of(leaves, count, options, self._gradient_reduction)
        with self._storage.begin_run(replica_weights, (fn, leaves), lambda: Frame(strategy)) as run_state:

            def call(replica: Replica) -> Tree:
                local_args, local_kwargs = select((args, kwargs), replica.index)
                with (
                    traced("run {} [replica {}]", fn, replica.index),
                    self._in_replica(strategy, replica, replica_weights, run_state),
                ):
                    result = fn(*local_args, **local_kwargs)
                    run_state.ends(replica)
                    return result

            results = self._replicas.run(call, replica_weights.present, run_state.watch)
            if any(_may_require_grad(leaf) for leaf in tree_flatten(list(results.values()))[0]):
                run_state.results_require_grad()
            result = regroup([results.get(r, ABSENT) for r in range(count)], are_results=True)
        run_state.warn()
        return result

    def _in_replica(
        self, strategy: StrategyLike, replica: Replica, replica_weights: ReplicaWeights, run_state: RunState
    ) -> AbstractContextManager[object]:
        """Makes this thread, for the length of a block, that of the replica."""
        collective = Collective(replica, replica_weights.present, replica_weights.weights, self._replicas.devices)
        group = ReplicaGroup(
            replica, collective, replica_weights.present, self._num_replicas_in_sync, run_state.published
        )
        context = running_context(strategy, group)
        stack = ExitStack()
        stack.enter_context(in_use(replica.device))
        stack.enter_context(Frame(strategy, context, run_state.local_objects(replica)))
        stack.callback(context._ends)
        return stack

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        if isinstance(value, (Mirrored, MirroredVariable)) and op is ReduceOp.MEAN:
            return value.values[0]
        if isinstance(value, DistributedValues):
            check_component_counts([value], self._num_replicas_in_sync)
            if self._cross_device_ops is not None:
                return self._cross_device_ops.reduce(op, value, self._storage.parameter_device)
            return combined(op, value.values, self._storage.parameter_device)
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
        device = self._storage.parameter_device
        if self._cross_device_ops is not None:
            totals = self._cross_device_ops.batch_reduce(op, [(leaves[i], device) for i in together], options)
        else:
            totals = combined_in_packs(op, [leaves[i].values for i in together], device, options.bytes_per_pack)
        reduced = dict(zip(together, totals, strict=True))
        return [reduced[i] if i in reduced else self._reduce(op, leaf) for i, leaf in enumerate(leaves)]

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        check_component_counts([value], self._num_replicas_in_sync)
        # A plain value counts as the same in every replica.
        values = value.values if isinstance(value, DistributedValues) else [value] * self._num_replicas_in_sync
        return combined_along(op, values, axis, self._storage.parameter_device)

    def _gather(self, value: Tree, axis: int) -> Tree:
        if not isinstance(value, DistributedValues):
            return _gathered_alone(value, axis) if self._num_replicas_in_sync == 1 else value
        check_component_counts([value], self._num_replicas_in_sync)
        return gathered(value.values, as_axis(axis), self._storage.parameter_device)

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        return distributed(dataset, self._replicas.devices, options)

    def _distribute_from_function(self, dataset_fn: DatasetFn, options: InputOptions) -> Any:
        return distributed_from_function(dataset_fn, self._replicas.devices, options)

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        self._storage.take_module(module)
        return module.to(memory_device(self._storage.parameter_device))

    def _distribute_optimizer(self, optimizer: Optimizer) -> None:
        self._storage.take_optimizer(optimizer)

    def _creation_scope(self) -> AbstractContextManager[Any]:
        return _creating_in(self._storage)

    def _device_of(self, replica: int) -> Device:
        return self._replicas.devices[replica]

    def _copy(self, memo: dict[int, Any]) -> StrategyExtended:
        replicas, storage = Replicas(self._replicas.devices), self._storage.like()
        settings = self._gradient_reduction, self._between_graph, self._cross_device_ops
        return ReplicatedExtended(replicas, storage, *settings)


def _run_alone(
    strategy: StrategyLike,
    device: Device | None,
    fn: ReplicaFn,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    own_containers: bool = False,
) -> Tree:
    """Calls the step in a lone replica on the user's own objects, which a step should not notice.

    It is called between steps, when no cache holds it: each function that it calls takes half a microsecond or more.
    """
    if args or kwargs:
        distributed = distributed_within((*args, *kwargs.values()))
        if distributed:
            check_component_counts(distributed, 1)
        if distributed or own_containers:
            args, kwargs = select(args, 0), select(kwargs, 0)
    frame, frames = LoneFrame(strategy), frames_of_this_thread()
    depth = len(frames)
    try:  # not a block: a signal's handler may raise on the way into its `__exit__`, and the frame would stay
        frames.append(frame)
        if device is None or not needs_device_context(device):
            return performed_alone(fn, args, kwargs)
        with in_use(device):
            return performed_alone(fn, args, kwargs)
    finally:
        del frames[depth:]
        frame.ends()


def _own(value: Tree) -> Tree:
    """The value of a lone replica, wherever it was made."""
    if not isinstance(value, DistributedValues):
        return value
    check_component_counts([value], 1)
    return value.values[0]


def _gathered_alone(value: Tree, axis: int) -> Tree:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        check_gatherable([value], axis)  # code that is written with one device should not break on two
    return value


def _refuse_input_options(options: InputOptions) -> None:
    if options != InputOptions():
        raise ValueError(
            f"The default strategy returns the dataset itself, so options={options} would do nothing. Leave them out, "
            "or distribute the dataset with a strategy that has a device, such as OneDeviceStrategy."
        )


def _sent(value: Tree, destinations: Any) -> Tree:
    """A value at its destinations: a tensor on a device, or a copy for each component of a distributed value."""
    if isinstance(destinations, DistributedValues):
        return _mirrored(value, destinations)
    device = (
        destinations.device if isinstance(destinations, torch.Tensor) else memory_device(canonical_device(destinations))
    )
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _mirrored(value: torch.Tensor, like: DistributedValues) -> Mirrored:
    for component in like.values:
        if not isinstance(component, torch.Tensor):
            raise ValueError(f"destinations has a component {component!r}, which is on no device: it must be a tensor.")
    return Mirrored([c if c is ABSENT else sent_to([value], [c.device])[0][0] for c in like._components])


def _may_require_grad(value: Tree) -> bool:
    """Whether a backward may begin at a leaf of a result: an object of the user's own may hold tensors."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return not isinstance(value, _WITHOUT_TENSORS) and torch.is_grad_enabled()


_WITHOUT_TENSORS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _require_variable(v: object) -> None:
    if not isinstance(v, (nn.Module, torch.Tensor)):
        raise TypeError(f"variable_created_in_scope asks about a module or a parameter; got a {type(v).__name__}.")


@contextmanager
def _creating_in(storage: Storage) -> Any:
    with in_use(storage.parameter_device), storage.watching():
        yield
