"""What the strategies on one machine have in common, and those of a single replica on the user's own objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._communication.cross_device_ops import delivered, devices_of
from torchstrategy._communication.options import CommunicationOptions, check_usable
from torchstrategy._communication.reductions import as_tensor, check_gatherable, combined
from torchstrategy._core.context import frames_of_this_thread, in_use, needs_device_context
from torchstrategy._core.devices import canonical_device, memory_device
from torchstrategy._core.distributed_values import (
    DistributedValues,
    check_component_counts,
    distributed_within,
    local_results,
    select,
)
from torchstrategy._core.options import ReduceOp, RunOptions, ValueContext
from torchstrategy._core.tree import map_leaves, tree_flatten
from torchstrategy._core.types import Device, ReplicaFn, Tree
from torchstrategy._execution.instruments import performed_alone
from torchstrategy._input.dataset import distributed, distributed_from_function
from torchstrategy._input.options import DatasetFn, InputContext, InputOptions, InputReplicationMode
from torchstrategy._replication.placement import Placement
from torchstrategy._replication.storage import Storage, is_nobodys
from torchstrategy._strategy.replica_context import LoneFrame
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._training.replica_weights import ReplicaWeights
from torchstrategy._variables.variable import Variable


class OneMachineExtended(StrategyExtended):
    """What a single replica and several replicas on one machine have in common.

    Args:
        storage: Where parameters live, and on which devices replicas run.
        between_graph: What TensorFlow says of `experimental_between_graph` under a strategy of this kind.
    """

    _makes_containers = False  # whether a lone replica gets lists and dicts of its own, as several replicas do

    def __init__(self, storage: Storage, between_graph: bool = False) -> None:
        super().__init__()
        self._storage = storage
        self._between_graph = between_graph
        self._alone_on: Device | None = storage.devices[0]  # where a lone replica runs; None: wherever the caller is

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        return self._storage.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        return self._storage.parameter_devices

    @property
    def experimental_between_graph(self) -> bool:
        return self._between_graph

    def variable_created_in_scope(self, v: nn.Module | torch.Tensor) -> bool:
        if not isinstance(v, (nn.Module, torch.Tensor)):
            raise TypeError(f"variable_created_in_scope asks about a module or a parameter; got a {type(v).__name__}.")
        return self._owns(self.value_container(v))

    def _owns(self, thing: nn.Module | torch.Tensor) -> bool:
        return self._storage.owns(thing)

    def _take_variable(self, variable: Variable) -> None:
        self._storage.take_variable(variable)

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._storage.devices) * self._workers.count

    def _local_results(self, distributed_value: Tree) -> tuple[Tree, ...]:
        return local_results(distributed_value, len(self._storage.devices))

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
        reduced = spec.unflatten(self._reduce_all(op, leaves, options))
        return [
            map_leaves(partial(_sent, destinations=where), value)
            for value, (_, where) in zip(reduced, pairs, strict=True)
        ]

    def _reduce_all(self, op: ReduceOp, leaves: Sequence[Tree], options: CommunicationOptions) -> list[Tree]:
        """The sum or mean of each of several leaves."""
        return [self._reduce(op, leaf) for leaf in leaves]

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        return _sent(tensor, destinations)

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        return distributed(dataset, self._storage.devices, options, self._workers)

    def _distribute_from_function(self, dataset_fn: DatasetFn, options: InputOptions) -> Any:
        return distributed_from_function(dataset_fn, self._storage.devices, options, self._workers)

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        self._storage.take_module(module)
        return module.to(memory_device(self._storage.parameter_device))

    def _distribute_optimizer(self, optimizer: Optimizer) -> None:
        self._storage.take_stepper(optimizer)

    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        """Calls the step in a single replica, which uses the user's own objects. This has to cost next to nothing.

        It runs between steps, when its code is in no cache of the processor: each function that it calls takes half a
        microsecond or more.
        """
        if options.examples is not None:
            ReplicaWeights.of((), 1, options, ReduceOp.MEAN)  # refuses counts that do not fit
        if args or kwargs:
            distributed = distributed_within((*args, *kwargs.values()))
            if distributed:
                check_component_counts(distributed, 1)
            if distributed or self._makes_containers:
                args, kwargs = select(args, 0), select(kwargs, 0)
        frame, frames = LoneFrame(self._container_strategy()), frames_of_this_thread()
        depth, device = len(frames), self._alone_on
        try:  # not a block: a signal's handler may raise on the way into its `__exit__`, and the frame would stay
            frames.append(frame)
            if device is None or not needs_device_context(device):
                return performed_alone(fn, args, kwargs)
            with in_use(device):
                return performed_alone(fn, args, kwargs)
        finally:
            del frames[depth:]
            frame.ends()

    @contextmanager
    def _creation_scope(self) -> Iterator[None]:
        with in_use(self._storage.parameter_device), self._storage.watching():
            yield


class OneDeviceExtended(OneMachineExtended):
    """One replica, on the caller's thread and on the user's own objects: nothing is wrapped, nothing put together."""

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        return _own(value)

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        tensor = as_tensor(_own(value))
        return combined(op, [tensor], axis, tensor.device)

    def _gather(self, value: Tree, axis: int) -> Tree:
        return gathered_alone(_own(value), axis)

    def _distribute_from_function(self, dataset_fn: DatasetFn, options: InputOptions) -> Any:
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "OneDeviceStrategy has one replica, so there is nothing to make an input pipeline for each replica "
                "for: leave out InputOptions(experimental_replication_mode=PER_REPLICA)."
            )
        return super()._distribute_from_function(dataset_fn, options)

    def _distribute_values(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        return value_fn(ValueContext())

    def _copy(self, memo: dict[int, Any]) -> StrategyExtended:
        return OneDeviceExtended(Storage(self._storage.layout))


@final
class DefaultExtended(OneDeviceExtended):
    """The same, wherever the caller is: it has no device of its own, and nothing belongs to it."""

    def __init__(self) -> None:
        super().__init__(Storage(Placement([torch.device("cpu", 0)], torch.device("cpu", 0))))  # which stays empty
        self._alone_on = None

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        raise RuntimeError("The default strategy has no devices of its own: it runs wherever its caller is.")

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        return self.worker_devices

    @property
    def experimental_between_graph(self) -> bool:
        raise NotImplementedError("The default strategy does not say: there are no graphs, and it has no devices.")

    def non_slot_devices(self, var_list: Iterable[Any]) -> tuple[Device, ...]:
        return (self._device_of(0),)

    def _owns(self, thing: nn.Module | torch.Tensor) -> bool:
        return is_nobodys(thing)

    def _take_variable(self, variable: Variable) -> None:
        pass

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        raise NotImplementedError(
            "The default strategy has no devices of its own to broadcast to. Write tensor.to(device)."
        )

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        _refuse_input_options(options)
        return dataset

    def _distribute_from_function(self, dataset_fn: DatasetFn, options: InputOptions) -> Any:
        _refuse_input_options(options)
        return dataset_fn(InputContext())

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        return module

    def _device_of(self, replica: int) -> Device:
        return canonical_device(None)


def gathered_alone(value: Tree, axis: int) -> Tree:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        check_gatherable([value], axis)  # code that is written with one device should not break on two
    return value


def _sent(value: Tree, destinations: Any) -> Tree:
    """A value at its destinations: a tensor on a device, or a copy for each component of a distributed value."""
    if not isinstance(value, torch.Tensor):
        devices_of(destinations)  # raises an error for what is none
        return value
    # The copies are the caller's, who may write on them.
    return delivered(value.clone() if isinstance(destinations, DistributedValues) else value, destinations)


def _own(value: Tree) -> Tree:
    """The value of a lone replica, wherever it was made."""
    if not isinstance(value, DistributedValues):
        return value
    check_component_counts([value], 1)
    return value.values[0]


def _refuse_input_options(options: InputOptions) -> None:
    if options != InputOptions():
        raise ValueError(
            f"The default strategy returns the dataset itself, so options={options} would do nothing. Leave them out, "
            "or distribute the dataset with a strategy that has a device, such as OneDeviceStrategy."
        )
