"""Strategy: where replicas run, where parameters live, how values become one and how data is split, put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.utils.data import Dataset

from torchstrategy._core.context import current_strategy, require_cross_replica, set_strategy
from torchstrategy._core.distributed_values import PerReplica
from torchstrategy._core.errors import plural
from torchstrategy._core.options import ValueContext
from torchstrategy._core.result_leaves import map_results
from torchstrategy._core.types import Tree
from torchstrategy._strategy.strategy_base import StrategyBase


class Strategy(StrategyBase):
    """Runs one ordinary training step in every replica, on one device or on many.

    Make one of its subclasses; this class is what they have in common.

    Args:
        extended: How this strategy does it.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     losses = (model(batch[0]) - batch[1]).square().mean(1)
        ...     losses.mean().backward()
        ...     optimizer.step()
        ...     return losses.detach()
        >>> loader = torch.utils.data.DataLoader([(torch.ones(2), torch.ones(1))] * 5, batch_size=4)
        >>> for batch in strategy.experimental_distribute_dataset(loader):
        ...     losses = strategy.run(step, args=(batch,))
        ...     mean = strategy.reduce("mean", losses, axis=0)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy
    """

    @overload
    def gather(self, value: torch.Tensor | PerReplica[Any], axis: int) -> torch.Tensor: ...
    @overload
    def gather(self, value: Any, axis: int) -> Any: ...
    def gather(self, value: Tree, axis: int) -> Tree:
        """The components of a value one after the other along `axis`, in replica order, as one tensor.

        Args:
            value: What `run` returned, with components of at least one dimension; containers and dataclasses are
                gathered leaf by leaf. A value that is not distributed is returned as it is.
            axis: Along which dimension; sizes along it may differ. Negative ones count from the end.

        Returns:
            Tensors on the parameter device.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(1, 2) * 3)
            >>> strategy.gather(value, axis=0)
            tensor([[3., 3.],
                    [3., 3.]])

        Raises:
            ValueError: If components are scalars, differ elsewhere than along `axis`, or have no such axis.
            RuntimeError: If called in a replica (use `ReplicaContext.all_gather` there) or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#gather
        """
        require_cross_replica(self, "Strategy.gather", instead="all_gather()")
        return map_results(lambda leaf: self._extended._gather(leaf, axis), value)

    def experimental_make_numpy_dataset(self, numpy_input: Tree) -> Dataset[Tree]:
        """A map-style dataset of the rows of arrays, for a `torch.utils.data.DataLoader`. Nothing is copied.

        Args:
            numpy_input: An array; or tuples, named tuples and dicts of arrays to any depth, with the same number of
                rows. A list of arrays is one array: they are stacked. Tensors are fine in place of arrays.

        Returns:
            A dataset whose elements are what `numpy_input` is, with a row in place of each array.

        Example:
            >>> import numpy
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> dataset = strategy.experimental_make_numpy_dataset((numpy.arange(3.0), numpy.array([5, 6, 7])))
            >>> len(dataset), dataset[1]
            (3, (tensor(1., dtype=torch.float64), tensor(6)))
            >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2)
            >>> numbers, labels = next(iter(strategy.experimental_distribute_dataset(loader)))
            >>> labels
            PerReplica:{
              0: tensor([5]),
              1: tensor([6])
            }

        Differs from tf.distribute:
            A change of an array is seen in the dataset. TensorFlow 2.4 has it in `compat.v1` only.

        Raises:
            ValueError: If arrays have no dimensions, differ in their numbers of rows, or cannot be stacked.
            TypeError: If something in `numpy_input` is no array.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/distribute/Strategy#experimental_make_numpy_dataset
        """
        return self._extended.experimental_make_numpy_dataset(numpy_input)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        """A distributed value whose component in each replica is what `value_fn` returns for it.

        Args:
            value_fn: Called with a `ValueContext` once for each replica, in order, on the caller's thread. May return
                anything; containers have to be alike for all replicas.

        Returns:
            A `DistributedValues`, or containers of them; with `OneDeviceStrategy` and the default strategy what
            `value_fn` returned.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group * 2)
            PerReplica:{
              0: 0,
              1: 2
            }

        Raises:
            TypeError: If `value_fn` cannot be called.
            ValueError: If it returns different structures.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#experimental_distribute_values_from_function
        """
        if not callable(value_fn):
            raise TypeError(f"value_fn is called with a ValueContext for each replica; {value_fn!r} cannot be called.")
        return self._extended._distribute_values(value_fn)

    def experimental_assign_to_logical_device(self, tensor: torch.Tensor, logical_device_id: int) -> torch.Tensor:
        """Places a tensor on one of the logical devices of its replica. A replica here has one: the tensor is returned.

        Example:
            >>> torchstrategy.OneDeviceStrategy("cpu").experimental_assign_to_logical_device(torch.ones(2), 0)
            tensor([1., 1.])

        Differs from tf.distribute:
            TensorFlow raises NotImplementedError for every strategy but TPUStrategy.

        Raises:
            ValueError: If `logical_device_id` is not 0.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#experimental_assign_to_logical_device
        """
        if logical_device_id != 0:
            raise ValueError(
                f"There is no logical device {logical_device_id}: each replica has 1 logical device, number 0."
            )
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: torch.Tensor, partition_dimensions: Sequence[int]
    ) -> torch.Tensor:
        """Splits a tensor over the logical devices of its replica. A replica here has one: the tensor is returned.

        Args:
            tensor: Any tensor.
            partition_dimensions: For each dimension of the tensor, in how many parts it is split.

        Example:
            >>> torchstrategy.OneDeviceStrategy("cpu").experimental_split_to_logical_devices(torch.ones(2), [1])
            tensor([1., 1.])

        Differs from tf.distribute:
            TensorFlow raises NotImplementedError for every strategy but TPUStrategy.

        Raises:
            ValueError: If there is not one number for each dimension, one does not divide its dimension, or they ask
                for more than one part in all.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#experimental_split_to_logical_devices
        """
        parts, shape = list(partition_dimensions), tuple(tensor.shape)
        product = math.prod(parts)
        if len(parts) != len(shape):
            why = f"has {plural(len(parts), 'number')} for a tensor of {plural(len(shape), 'dimension')}"
        elif any(part < 1 or size % part for size, part in zip(shape, parts, strict=True)):
            why = f"does not divide a tensor of shape {shape}"
        elif product != 1:
            why = f"asks for {product} parts"
        else:
            return tensor
        raise ValueError(f"partition_dimensions={parts} {why}. Each replica has 1 logical device, number 0.")

    def experimental_replicate_to_logical_devices(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replicates a tensor to the logical devices of its replica. A replica here has one: the tensor is returned.

        Example:
            >>> torchstrategy.OneDeviceStrategy("cpu").experimental_replicate_to_logical_devices(torch.ones(2))
            tensor([1., 1.])

        Differs from tf.distribute:
            TensorFlow raises NotImplementedError for every strategy but TPUStrategy.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#experimental_replicate_to_logical_devices
        """
        return tensor


def get_strategy() -> Strategy:
    """The strategy in whose scope, or in whose replica, the caller is; outside, the default strategy.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     torchstrategy.get_strategy() is strategy
        True
        >>> torchstrategy.get_strategy() is strategy
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/get_strategy
    """
    return current_strategy()  # type: ignore[return-value]  # one of compat.v1 only in its own scope and replicas


def experimental_set_strategy(strategy: StrategyBase | None) -> None:
    """Makes `strategy` the current one for the rest of this thread, as if all that follows stood in its scope.

    Calling it again replaces the strategy; `None` takes it away.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> torchstrategy.experimental_set_strategy(strategy)
        >>> torchstrategy.get_strategy() is strategy
        True
        >>> torchstrategy.experimental_set_strategy(None)

    Raises:
        RuntimeError: If called in a `scope()` block or in a replica.
        TypeError: If `strategy` is not a strategy.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental_set_strategy
    """
    if strategy is not None and not isinstance(strategy, StrategyBase):
        raise TypeError(f"experimental_set_strategy takes a torchstrategy.Strategy or None; got {strategy!r}.")
    set_strategy(strategy)
