"""A single replica on the user's own objects: nothing is wrapped, and nothing is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._communication.reductions import as_tensor, combined_along
from torchstrategy._core.devices import canonical_device, memory_device
from torchstrategy._core.distributed_values import (
    DistributedValues,
    check_component_counts,
)
from torchstrategy._core.options import ReduceOp, RunOptions, ValueContext
from torchstrategy._core.types import Device, ReplicaFn, Tree
from torchstrategy._input.dataset import distributed, distributed_from_function
from torchstrategy._input.options import DatasetFn, InputContext, InputOptions, InputReplicationMode
from torchstrategy._replication.storage import Storage, is_nobodys
from torchstrategy._strategy.one_machine import (
    OneMachineExtended,
    creating_in,
    gathered_alone,
    require_variable,
    run_alone,
)
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._variables.variable import Variable


@final
class SingleExtended(OneMachineExtended):
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
        require_variable(v)
        return is_nobodys(v) if self._storage is None else self._storage.owns(v)

    def _take_variable(self, variable: Variable) -> None:
        if self._storage is not None:
            self._storage.take_variable(variable)

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        return run_alone(self._container_strategy(), self._device, fn, args, kwargs, options)

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        return _own(value)

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        tensor = as_tensor(_own(value))
        return combined_along(op, [tensor], axis, tensor.device)

    def _gather(self, value: Tree, axis: int) -> Tree:
        return gathered_alone(_own(value), axis)

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
        return nullcontext() if self._storage is None else creating_in(self._storage)

    def _device_of(self, replica: int) -> Device:
        return canonical_device(None) if self._device is None else self._device

    def _copy(self, memo: dict[int, Any]) -> StrategyExtended:
        return SingleExtended(self._device, None if self._storage is None else self._storage.like())


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
