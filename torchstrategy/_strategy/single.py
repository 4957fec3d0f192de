"""A single replica on the user's own objects: nothing is wrapped, and nothing is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._communication.operands import as_tensor
from torchstrategy._communication.reductions import combined_along
from torchstrategy._core.devices import canonical_device
from torchstrategy._core.distributed_values import DistributedValues, check_component_counts
from torchstrategy._core.options import ReduceOp, RunOptions, ValueContext
from torchstrategy._core.types import Device, ReplicaFn, Tree
from torchstrategy._input.dataset import DatasetFn
from torchstrategy._input.options import InputContext, InputOptions, InputReplicationMode
from torchstrategy._replication.storage import InPlaceStorage, is_nobodys
from torchstrategy._strategy.one_machine import (
    OneMachineExtended,
    gathered_alone,
    run_alone,
)
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._variables.variable import Variable


class OneDeviceExtended(OneMachineExtended):
    """One replica, on the caller's thread and on the user's own objects: nothing is wrapped, nothing put together."""

    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        return run_alone(self._container_strategy(), self._storage.devices[0], fn, args, kwargs, options)

    def _reduce(self, op: ReduceOp, value: Tree) -> Tree:
        return _own(value)

    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree:
        tensor = as_tensor(_own(value))
        return combined_along(op, [tensor], axis, tensor.device)

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
        return OneDeviceExtended(self._storage.like())


@final
class DefaultExtended(OneDeviceExtended):
    """The same, wherever the caller is: it has no device of its own, and nothing belongs to it."""

    def __init__(self) -> None:
        super().__init__(InPlaceStorage([torch.device("cpu", 0)], torch.device("cpu", 0)))  # which stays empty

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

    def _run(self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions) -> Tree:
        return run_alone(self._container_strategy(), None, fn, args, kwargs, options)

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

    def _distribute_optimizer(self, optimizer: Optimizer) -> None:
        pass

    def _device_of(self, replica: int) -> Device:
        return canonical_device(None)


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
