"""What `Strategy.extended` offers, and what each kind of strategy implements.

A kind of strategy implements the methods with an underscore.

All are optional: some have a default, and calling another one that a subclass does not
define raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from torchstrategy._base.context import (
    current_replica_context,
    current_strategy,
    require_cross_replica,
    using_device,
)
from torchstrategy._base.devices import canonical_device
from torchstrategy._base.distributed_values import (
    ABSENT,
    DistributedValues,
    PerReplica,
    distributed_within,
    regroup,
    select,
)
from torchstrategy._base.errors import plural, require_type
from torchstrategy._base.options import NO_OPTIONS, ReduceOp, RunOptions, ValueContext
from torchstrategy._base.result_leaves import map_results
from torchstrategy._base.row_errors import nothing_to_count_error, several_batches_error
from torchstrategy._base.row_lists import is_row_list, own_rows
from torchstrategy._base.types import Device, DeviceLike, ReplicaFn, StrategyLike, Tree
from torchstrategy._data.arrays import ArrayDataset
from torchstrategy._data.batch_types import rows_of
from torchstrategy._data.dataset import next_of
from torchstrategy._data.options import DatasetFn, InputOptions
from torchstrategy._group.reductions import as_axis, as_tensor, sum_along
from torchstrategy._parity.options import (
    USUAL_OPTIONS,
    CommunicationOptions,
    as_options,
)
from torchstrategy._variables.kinds import VariablesOfExtended
from torchstrategy.cluster_resolver import ClusterResolver


@final
class MultiStepContext:
    """What `experimental_run_steps_on_iterator` hands to each step.

    The method returns it after the last step.

    Attributes:
        last_step_outputs: For each name, the output that was set last.
        non_tensor_outputs: For each name, the value that `set_non_tensor_output` was
            given last.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> iterator = strategy.make_dataset_iterator(
        ...     [torch.ones(4), torch.ones(4) * 3]
        ... )
        >>> def steps(context, batch):
        ...     losses = strategy.run(lambda rows: rows.mean(), args=(batch,))
        ...     context.set_last_step_output("loss", losses, "mean")
        >>> run_steps = strategy.extended.experimental_run_steps_on_iterator
        >>> run_steps(steps, iterator, 2).last_step_outputs
        {'loss': tensor(3.)}
    """

    def __init__(self, last_step_outputs: Mapping[str, Tree]) -> None:
        self.last_step_outputs = dict(last_step_outputs)
        self.non_tensor_outputs: dict[str, Tree] = {}

    def set_last_step_output(
        self, name: str, output: Tree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Keeps `output` under `name` in `last_step_outputs`.

        In a replica this is a synchronization point.

        Args:
            name: The name under which the output is kept.
            output: What to keep.
            reduce_op: How the outputs of the replicas are reduced to one. None: they
                are kept as they are, which is not allowed in a replica.

        Raises:
            ValueError: If it is called in a replica without `reduce_op`.
        """
        context = current_replica_context()
        if context is not None and reduce_op is None:
            raise ValueError(
                f"set_last_step_output({name!r}, ...) was called in a replica, where "
                "reduce_op has to say how the outputs of all replicas become one: give "
                "it, or keep what strategy.run returns."
            )

        # The name is not brought to the synchronization point: a name that each replica
        # has put together is another object in each of them.
        def keep(strategy: StrategyLike, merged: Tree) -> None:
            reduced = (
                merged
                if reduce_op is None
                else strategy.reduce(reduce_op, merged, axis=None)
            )
            self.last_step_outputs[name] = reduced

        if context is None:
            keep(current_strategy(), output)
        else:
            context.merge_call(keep, args=(output,))

    def set_non_tensor_output(self, name: str, output: Tree) -> None:
        """Keeps `output` under `name` in `non_tensor_outputs`.

        In a replica this is a synchronization point.

        What is set in replicas is kept as a tuple, with an item for each of them.
        """

        def keep(strategy: StrategyLike, merged: Tree) -> None:
            self.non_tensor_outputs[name] = strategy.experimental_local_results(merged)

        context = current_replica_context()
        if context is None:
            self.non_tensor_outputs[name] = output
        else:
            context.merge_call(keep, args=(output,))


class StrategyExtended(VariablesOfExtended):
    """What `Strategy.extended` offers to libraries that are built on strategies.

    Subclass it to make a strategy of your own.

    A subclass of yours brings what `Strategy` is to do; docs/custom-strategies.md says
    how.

    Args:
        container_strategy: The strategy to which this object belongs. None: the one
            that it will be given to.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.worker_devices
        (device(type='cpu', index=0), device(type='cpu', index=1))

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended
    """

    # What a strategy over several processes was given.
    _cluster_resolver: ClusterResolver | None = None

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The device of each replica."""
        raise self._missing("worker_devices")

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: batches may be of any size."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether TensorFlow builds a graph for each worker under this strategy.

        This library builds no graphs.
        """
        raise self._missing("experimental_between_graph")

    @property
    def experimental_should_init(self) -> bool:
        """True: each process initializes its own variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process saves checkpoints and summaries.

        The first of several processes does, and so does a process that is alone.
        """
        return self._workers.index == 0

    should_save_summary = should_checkpoint

    def call_for_each_replica(
        self,
        fn: ReplicaFn,
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        """Does what `Strategy.run` does.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"])
            >>> strategy.extended.call_for_each_replica(lambda x: x + 1, (1,))
            2
        """
        require_cross_replica(self._container_strategy(), "call_for_each_replica")
        try:
            own_args, own_kwargs = tuple(args), dict(kwargs or {})
        except (TypeError, ValueError) as error:
            self._refuse_run(error)
            raise
        return self._run(fn, own_args, own_kwargs, NO_OPTIONS)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        destinations: DeviceLike | DistributedValues,
        options: CommunicationOptions | None = None,
    ) -> Tree:
        """The sum or mean of a value over the replicas, on the devices of one's choice.

        Args:
            reduce_op: `SUM` or `MEAN`.
            value: What `run` returned; containers are reduced leaf by leaf.
            destinations: A device, a tensor whose device is meant, or a
                `DistributedValues`, for a copy on the device of each of its components.
            options: How values are sent.

        Returns:
            A tensor, or a mirrored value for a distributed destination.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(2) * 2)
            >>> strategy.extended.reduce_to("sum", value, "cpu:0")
            tensor([4., 4.])

        Raises:
            ValueError: If shapes differ, the destination is not there, or an option
                asks for what cannot be done.
            TypeError: If the destination is a list or tuple.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended#reduce_to
        """
        require_cross_replica(self._container_strategy(), "reduce_to")
        with self._exchanging("reduce_to"):
            _check_destinations(destinations)
            return self._reduce_to(
                ReduceOp.of(reduce_op),
                value,
                destinations,
                as_options("reduce_to", options),
            )

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Tree, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """`reduce_to` for several (value, destinations) pairs, which may go together.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(1) * 2)
            >>> strategy.extended.batch_reduce_to("mean", [(value, "cpu:0")])
            [tensor([2.])]

        Raises:
            ValueError: If an entry is not a pair, or `reduce_to` would raise one.
        """
        require_cross_replica(self._container_strategy(), "batch_reduce_to")
        with self._exchanging("batch_reduce_to"):
            pairs = list(value_destination_pairs)
            for pair in pairs:
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ValueError(
                        "batch_reduce_to takes (value, destinations) pairs; got "
                        f"{pair!r}."
                    )
                _check_destinations(pair[1])
            return self._batch_reduce_to(
                ReduceOp.of(reduce_op), pairs, as_options("batch_reduce_to", options)
            )

    def broadcast_to(
        self, tensor: Tree, destinations: DeviceLike | DistributedValues
    ) -> Tree:
        """A tensor on the devices of one's choice.

        Args:
            tensor: What to copy. A number is returned as it is.
            destinations: A device, a tensor whose device is meant, or a
                `DistributedValues`, for a copy on the device of each of its components.

        Returns:
            A tensor, or a mirrored value for a distributed destination.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(2) * 2)
            >>> strategy.extended.broadcast_to(torch.zeros(1), value)
            Mirrored:{
              0: tensor([0.]),
              1: tensor([0.])
            }

        Raises:
            ValueError: If the destination is not there.
            TypeError: If the destination is a list or tuple, or `tensor` is neither a
                tensor nor a number.
            NotImplementedError: Under the default strategy.
            RuntimeError: If called in a replica or in another strategy's scope.
        """
        require_cross_replica(self._container_strategy(), "broadcast_to")
        _check_destinations(destinations)
        if isinstance(tensor, (int, float, complex)):
            return tensor
        require_type(tensor, torch.Tensor, "broadcast_to sends a tensor")
        return self._broadcast_to(tensor, destinations)

    def non_slot_devices(self, var_list: Iterable[Any]) -> tuple[Device, ...]:
        """Where an optimizer keeps what it has only once, such as its number of steps.

        That is where the parameters are.

        Args:
            var_list: The parameters that it optimizes.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> strategy.extended.non_slot_devices([torch.ones(1)])
            (device(type='cpu', index=0),)

        Differs from tf.distribute:
            Under central storage and the default strategy, TensorFlow returns one of
            the variables.
        """
        return self.parameter_devices

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(*args, **kwargs)` once for each device of `colocate_with`.

        During the call, that device is the current one.

        A distributed value in the arguments is, in the first call, its first component,
        and so on.

        Args:
            colocate_with: What `non_slot_devices` returned; or a device, or a tensor
                whose device is meant.
            fn: What to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            group: Whether what the calls returned is put together as by `Strategy.run`.
                False: to a tuple with an item for each call, at each leaf.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> steps = torch.zeros(())
            >>> strategy.extended.update_non_slot(
            ...     strategy.extended.non_slot_devices([]), steps.add_, (1,)
            ... )
            tensor(1.)

        Raises:
            ValueError: If there is no device in `colocate_with`, or the calls return
                different structures.
            RuntimeError: If called in a replica or in another strategy's scope.
        """
        strategy = self._container_strategy()
        require_cross_replica(strategy, "update_non_slot")
        places = (
            colocate_with
            if isinstance(colocate_with, (list, tuple))
            else [colocate_with]
        )
        if not places:
            raise ValueError(
                "update_non_slot(colocate_with=()) names no device to call its "
                "function for."
            )
        named = [one.device if isinstance(one, torch.Tensor) else one for one in places]
        devices = [canonical_device(one) for one in named]

        def on_device(device: Device, /, *args: Tree, **kwargs: Tree) -> Tree:
            with using_device(device):
                return fn(*args, **kwargs)

        with strategy.scope():
            return self._call_for_each(on_device, devices, args, kwargs, group)

    def experimental_make_numpy_dataset(
        self, numpy_input: Tree, session: None = None
    ) -> Dataset[Tree]:
        """What `Strategy.experimental_make_numpy_dataset` does.

        Args:
            numpy_input: See there.
            session: None: there are no sessions.
        """
        require_cross_replica(
            self._container_strategy(), "Strategy.experimental_make_numpy_dataset"
        )
        if session is not None:
            raise ValueError(
                f"experimental_make_numpy_dataset(session={session!r}): there are no "
                "sessions here."
            )
        return ArrayDataset(numpy_input)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Tree], object],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Tree] | None = None,
    ) -> MultiStepContext:
        """Calls `fn(context, batch)` for several batches, in the scope of the strategy.

        Args:
            fn: Calls `Strategy.run` with the batch, and keeps in the `context` what is
                wanted when all is done.
            iterator: What `Strategy.make_dataset_iterator` returned, or another with
                `get_next()`.
            iterations: How many batches to run.
            initial_loop_values: What `last_step_outputs` holds where `fn` sets nothing.

        Returns:
            The `MultiStepContext`: its `last_step_outputs` and `non_tensor_outputs` are
            what was set last.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> iterator = strategy.make_dataset_iterator(
            ...     [torch.ones(2), torch.ones(3)]
            ... )
            >>> def fn(context, batch):
            ...     context.set_last_step_output(
            ...         "rows", strategy.run(len, args=(batch,))
            ...     )
            >>> run_steps = strategy.extended.experimental_run_steps_on_iterator
            >>> run_steps(fn, iterator, iterations=2).last_step_outputs
            {'rows': 3}

        Differs from tf.distribute:
            It works under central storage.

        Raises:
            OutOfRangeError: If there are fewer batches.
            ValueError: If `iterations` is negative.
            RuntimeError: If called in a replica or in another strategy's scope.
        """
        strategy = self._container_strategy()
        require_cross_replica(strategy, "experimental_run_steps_on_iterator")
        with self._exchanging("experimental_run_steps_on_iterator"):
            if iterations < 0:
                raise ValueError(
                    f"experimental_run_steps_on_iterator(iterations={iterations}): a "
                    "number of batches."
                )
        context = MultiStepContext(initial_loop_values or {})
        with strategy.scope():
            for _ in range(iterations):
                fn(context, next_of(iterator))
        return context

    # What a kind of strategy brings. The first four are all that `run` and `reduce`
    # need.

    @property
    def _num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        raise self._missing("_num_replicas_in_sync")

    def _call_for_each_replica(
        self, fn: ReplicaFn, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        """Calls `fn` in a `ReplicaContext` for each replica, and joins the results."""
        raise self._missing("_call_for_each_replica")

    def _local_results(self, distributed_value: Tree) -> tuple[Tree, ...]:
        """The components of a value; of one that is not distributed, that one."""
        raise self._missing("_local_results")

    def _reduce_to(
        self,
        reduce_op: ReduceOp,
        value: Tree,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Tree:
        """The sum or mean of a value over the replicas, at its destinations."""
        raise self._missing("_reduce_to")

    def _batch_reduce_to(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Tree, Any]],
        options: CommunicationOptions,
    ) -> list[Tree]:
        """`reduce_to` of several values."""
        return [
            self._reduce_to(reduce_op, value, where, options)
            for value, where in value_destination_pairs
        ]

    def _run(
        self,
        fn: ReplicaFn,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        options: RunOptions,
    ) -> Tree:
        if options != NO_OPTIONS:
            raise ValueError(
                f"{type(self).__name__} has no use for {options}: call run without "
                "options."
            )
        with self._container_strategy().scope():
            return self._call_for_each_replica(fn, args, kwargs)

    def _reduce_leaf(self, op: ReduceOp, value: Tree) -> Tree:
        """The sum or mean of one leaf over the replicas."""
        return self._local_results(
            self._reduce_to(op, value, torch.device("cpu"), USUAL_OPTIONS)
        )[0]

    def _reduce_nested(self, op: ReduceOp, value: Tree) -> Tree:
        """What a step returned, with the sum or mean in place of each leaf."""
        return map_results(lambda leaf: self._reduce_leaf(op, leaf), value)

    def _weighted_mean(self, value: Tree, weights: Tree) -> Tree:
        if not isinstance(value, DistributedValues):
            return self._reduce_leaf(ReduceOp.MEAN, value)
        products, sizes = _weighted_parts(value, weights)
        mean = self._reduce_leaf(ReduceOp.SUM, products) / self._reduce_leaf(
            ReduceOp.SUM, sizes
        )
        # A worker whose replicas have no rows has a value that tells the dtype.
        shown = value.values[0] if value.values else getattr(value, "understudy", mean)
        dtype = as_tensor(shown).dtype
        return mean.to(dtype) if dtype.is_floating_point or dtype.is_complex else mean

    def _count_rows(self, batch: Tree) -> int:
        """The rows of a batch in all replicas of all workers."""
        found = distributed_within(batch)
        if not found:
            return _rows(batch, batch)
        rows = {
            leaf.rows
            for leaf in found
            if isinstance(leaf, PerReplica) and leaf.rows is not None
        }
        if len(rows) > 1:
            raise several_batches_error(rows)
        of_all = {
            leaf.rows_of_all
            for leaf in found
            if isinstance(leaf, PerReplica) and leaf.rows_of_all is not None
        }
        if len(of_all) == 1:
            return sum(of_all.pop())
        if rows:
            own = sum(rows.pop())
        else:  # what a step returned
            there = [
                r for r, one in enumerate(found[0]._components) if one is not ABSENT
            ]
            own = sum(_rows(select(batch, r), batch) for r in there)
        return sum(self._workers.all_gather_object(own, "strategy.count_rows"))

    def _reduce_along_axis(
        self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]
    ) -> Tree:
        """The sum or mean of a leaf over the replicas, and along axes in each."""
        total = self._reduce_leaf(
            ReduceOp.SUM,
            self._run(lambda v: sum_along(v, axis)[0], (value,), {}, NO_OPTIONS),
        )
        if op is ReduceOp.SUM:
            return total
        sizes = self._run(
            lambda v: torch.tensor(sum_along(v, axis)[1]), (value,), {}, NO_OPTIONS
        )
        return total / self._reduce_leaf(ReduceOp.SUM, sizes)

    def _gather(self, value: Tree, axis: int) -> Tree:
        raise self._missing("_gather")

    def _agree_on_parts(self, paths: Callable[[], Sequence[str]]) -> None:
        """Refuses a value of which several workers have other parts.

        `paths` says how Python code reads each part.
        """

    def _gathering(self, axis: int) -> Callable[[Tree], Tree]:
        """A function that gathers a leaf.

        The leaf is a value of all replicas, or a list of Python objects.
        """

        def gather(leaf: Tree) -> Tree:
            if not is_row_list(leaf):
                return self._gather(leaf, axis)
            if as_axis(axis) != 0:
                raise ValueError(
                    "A list with a Python object for each row is gathered along "
                    f"axis=0; got axis={axis!r}. Only tensors have other dimensions: "
                    "make one of the numbers in the step, or leave them as rows."
                )
            return self._gather_rows(leaf)

        return gather

    def _gather_rows(self, value: Tree) -> list[Any]:
        """The rows of all replicas, of a list with a Python object for each row."""
        rows = own_rows(value)
        return list(value) if rows is None else list(chain.from_iterable(rows))

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        raise self._missing("_broadcast_to")

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        raise self._missing("_distribute_dataset")

    def _distribute_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions
    ) -> Any:
        raise self._missing("_distribute_from_function")

    def _distribute_values(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        everyone = self._num_replicas_in_sync
        count = everyone // self._workers.count
        own = range(self._workers.index * count, (self._workers.index + 1) * count)
        return regroup(
            [value_fn(ValueContext(r, everyone)) for r in own], always_wrap=True
        )

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        raise self._missing("_distribute_module")

    def _distribute_optimizer(self, optimizer: Optimizer) -> None:
        raise self._missing("_distribute_optimizer")

    def _exchanging(self, call: str) -> AbstractContextManager[None]:
        """A block of a call in which several processes exchange values.

        If the block fails, the other processes learn why.
        """
        return _ALONE

    def _refuse_run(self, error: Exception) -> None:
        """Tells the other processes that this one refuses a run before it begins.

        This process refuses the arguments of the run.
        """

    def _creation_scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _device_of(self, replica: int) -> Device:
        return self.worker_devices[replica]


_ALONE = nullcontext()  # what no other process waits for


def _check_destinations(destinations: object) -> None:
    if isinstance(destinations, (list, tuple)):
        raise TypeError(
            "destinations is one device, tensor or distributed value; got "
            f"{destinations!r}."
        )
    if destinations is None:
        raise ValueError(
            "destinations says where the result goes: a device, tensor or distributed "
            "value; got None."
        )


def _rows(component: Tree, batch: Tree) -> int:
    rows = rows_of(component)
    if rows is None:
        raise nothing_to_count_error(batch)
    return rows


def _weighted_parts(
    value: DistributedValues, weights: Tree
) -> tuple[PerReplica, PerReplica]:
    """The components times their weights, and the weights.

    The mean is the sum of the products over the sum of the weights.

    Raises:
        ValueError: If it is not known how much a replica weighs.
        TypeError: If a component, or a weight, is no number.
    """
    components = value._components
    products: list[Tree] = []
    sizes: list[Tree] = []
    for component, weight in zip(
        components, _weights(weights, len(components)), strict=True
    ):
        product, size = (
            (ABSENT, ABSENT) if component is ABSENT else _multiply(component, weight)
        )
        products.append(product)
        sizes.append(size)
    # This is the value of a worker without rows, which does not count.
    spare = getattr(value, "understudy", None)
    product, size = (None, None) if spare is None else _multiply(spare, 0)
    return PerReplica(products, understudy=product), PerReplica(sizes, understudy=size)


def _multiply(component: Tree, weight: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """A component times its weight, and the weight, as tensors."""
    if weight is ABSENT:
        raise ValueError(
            "weights=... has no weight for a replica that has a value: give the batch "
            "of the same step."
        )
    tensor = as_tensor(component)
    # A sum of many rows may be more than a half can hold.
    wide = tensor.detach().to(
        torch.promote_types(tensor.dtype, torch.get_default_dtype())
    )
    size = as_tensor(weight).detach().to(wide)
    if size.numel() != 1:
        raise ValueError(
            "A weight is one number for each replica; got one of shape "
            f"{tuple(size.shape)}."
        )
    size = size.reshape(())
    # The mean of no rows is NaN, and does not count.
    return torch.where(size == 0, 0, wide * size), size


def _weights(weights: Tree, count: int) -> Sequence[Tree]:
    found = distributed_within(weights)
    rows = {
        leaf.rows
        for leaf in found
        if isinstance(leaf, PerReplica) and leaf.rows is not None
    }
    if len(rows) == 1:
        return rows.pop()
    if isinstance(weights, DistributedValues) and not rows:
        return weights._components
    if isinstance(weights, (list, tuple)) and not found and len(weights) == count:
        return weights
    got = (
        f"a batch that was split with different rows, {sorted(rows)}"
        if rows
        else f"{weights!r}"
    )
    raise ValueError(
        "weights=... says how much each replica weighs: give the batch that the "
        "strategy split, what strategy.run returned, such as a count of tokens, or a "
        f"list of {plural(count, 'number')}, one for each replica. Got {got}."
    )
