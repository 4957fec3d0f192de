"""What `Strategy.extended` offers, and what a kind of strategy has to bring: the methods with an underscore."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._comm import sent_to
from torchstrategy._context import require_cross_replica
from torchstrategy._devices import canonical, place
from torchstrategy._input import DatasetFn, InputOptions
from torchstrategy._options import NO_OPTIONS, ReduceOp, RunOptions, ValueContext
from torchstrategy._replica_context import refuse_options
from torchstrategy._tree import map_leaves
from torchstrategy._types import Device, DeviceLike, ReplicaFn, Tree
from torchstrategy._values import ABSENT, DistributedValues, Mirrored
from torchstrategy._variables import VariablesOfExtended

if TYPE_CHECKING:
    from torchstrategy._strategy import Strategy


def _mirrored(value: torch.Tensor, like: DistributedValues) -> Mirrored:
    """A copy of `value` on the device of each component of `like`."""
    for component in like.values:
        if not isinstance(component, torch.Tensor):
            raise ValueError(f"destinations has a component {component!r}, which is on no device: it must be a tensor.")
    return Mirrored([c if c is ABSENT else sent_to([value], [c.device])[0][0] for c in like._components])


class StrategyExtended(VariablesOfExtended, ABC):
    """What `Strategy.extended` offers, for libraries that are built on strategies.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.worker_devices
        (device(type='cpu', index=0), device(type='cpu', index=1))

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended
    """

    def __init__(self) -> None:
        self._strategy_reference: weakref.ref[Strategy] | None = None

    @property
    @abstractmethod
    def worker_devices(self) -> tuple[Device, ...]:
        """The device of each replica."""

    @property
    @abstractmethod
    def parameter_devices(self) -> tuple[Device, ...]:
        """Where parameters live."""

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: batches may be of any size."""
        return False

    def call_for_each_replica(
        self, fn: ReplicaFn, args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        """Does what `Strategy.run` does.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"])
            >>> strategy.extended.call_for_each_replica(lambda x: x + 1, (1,))
            2
        """
        require_cross_replica(self._strategy, "call_for_each_replica")
        return self._call_for_each_replica(fn, tuple(args), dict(kwargs or {}), NO_OPTIONS)

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Tree, destinations: DeviceLike | DistributedValues, options: None = None
    ) -> Tree:
        """The sum or mean of a value over the replicas, on the devices of one's choice.

        Args:
            reduce_op: `SUM` or `MEAN`.
            value: What `run` returned; containers are reduced leaf by leaf.
            destinations: A device, a tensor whose device is meant, or a `DistributedValues`, for a copy on the device
                of each of its components.
            options: None.

        Returns:
            A tensor, or a mirrored value for a distributed destination.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(2) * 2)
            >>> strategy.extended.reduce_to("sum", value, "cpu:0")
            tensor([4., 4.])

        Raises:
            ValueError: If shapes differ, or the destination is not there.
            TypeError: If the destination is a list or tuple.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended#reduce_to
        """
        require_cross_replica(self._strategy, "reduce_to")
        refuse_options("reduce_to", options)
        op = ReduceOp.of(reduce_op)
        if isinstance(destinations, (list, tuple)):
            raise TypeError(f"destinations is one device, tensor or distributed value; got {destinations!r}.")
        if destinations is None:
            raise ValueError(
                "destinations says where the result goes: a device, a tensor or a distributed value; got None."
            )
        reduced = map_leaves(lambda leaf: self._reduce(op, leaf), value)
        if isinstance(destinations, DistributedValues):
            return map_leaves(lambda leaf: _mirrored(leaf, destinations), reduced)
        device = destinations.device if isinstance(destinations, torch.Tensor) else place(canonical(destinations))
        return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, reduced)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Tree, Any]], options: None = None
    ) -> list[Tree]:
        """`reduce_to` for each of several (value, destinations) pairs.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(1) * 2)
            >>> strategy.extended.batch_reduce_to("mean", [(value, "cpu:0")])
            [tensor([2.])]

        Raises:
            ValueError: If an entry is no pair; and as `reduce_to`.
        """
        require_cross_replica(self._strategy, "batch_reduce_to")
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"batch_reduce_to takes (value, destinations) pairs; got {pair!r}.")
        return [self.reduce_to(reduce_op, value, destinations, options) for value, destinations in pairs]

    @abstractmethod
    def variable_created_in_scope(self, v: nn.Module | torch.Tensor) -> bool:
        """Whether a module was created in a scope of this strategy, or a parameter given to a module there.

        Raises:
            TypeError: If it is neither.
        """

    @property
    def _strategy(self) -> Strategy:
        strategy = self._strategy_reference() if self._strategy_reference is not None else None
        if strategy is None:
            raise RuntimeError("The strategy of this `extended` is gone. Keep the strategy, not only its `extended`.")
        return strategy

    def _bind(self, strategy: Strategy) -> None:
        self._strategy_reference = weakref.ref(strategy)

    @property
    @abstractmethod
    def _num_replicas_in_sync(self) -> int: ...

    @abstractmethod
    def _call_for_each_replica(
        self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions
    ) -> Tree: ...

    @abstractmethod
    def _reduce(self, op: ReduceOp, value: Tree) -> Tree: ...

    @abstractmethod
    def _reduce_along(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]) -> Tree: ...

    @abstractmethod
    def _gather(self, value: Tree, axis: int) -> Tree: ...

    @abstractmethod
    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any: ...

    @abstractmethod
    def _distribute_from_function(self, dataset_fn: DatasetFn, options: InputOptions) -> Any: ...

    @abstractmethod
    def _distribute_values(self, value_fn: Callable[[ValueContext], Tree]) -> Tree: ...

    @abstractmethod
    def _distribute_module(self, module: nn.Module) -> nn.Module: ...

    @abstractmethod
    def _distribute_optimizer(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def _creation_scope(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def _device_of(self, replica: int) -> Device: ...

    @abstractmethod
    def _copy(self) -> StrategyExtended: ...
