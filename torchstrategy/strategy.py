"""The class `Strategy`, and what it shares with the `Strategy` of compat.v1.

A strategy puts together where replicas run, where parameters live, how data is split
and how the replicas' values become one.

`StrategyBase` has the methods that strategies of TensorFlow 1 and 2 share. Each checks
its call and passes it to `extended`. Each version has a class `Strategy` with further
methods. A strategy is a subclass of it with a constructor.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from threading import get_ident
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    TypeAlias,
    TypeVar,
    cast,
    final,
    overload,
)

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from typing_extensions import Self

from torchstrategy._base.context import (
    Frame,
    current_frame,
    is_default,
    require_cross_replica,
)
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.errors import (
    did_you_mean,
    hide_frames,
    plural,
    require_type,
    unpicklable,
)
from torchstrategy._base.options import NO_OPTIONS, ReduceOp, RunOptions, ValueContext
from torchstrategy._base.result_leaves import map_results, paths_of_results
from torchstrategy._base.row_lists import is_row_list_or_one_thing
from torchstrategy._base.torch_internals import is_profiling
from torchstrategy._base.trace import traced
from torchstrategy._base.types import Device, ReplicaFn, StrategyLike, Tree
from torchstrategy._data.dataset import (
    DistributedDataset,
    DistributedIterator,
    InputIterator,
    from_input_fn,
    next_of,
)
from torchstrategy._data.options import (
    DatasetFn,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from torchstrategy.cluster_resolver import ClusterResolver
from torchstrategy.extended import StrategyExtended

S = TypeVar("S", bound=StrategyLike)
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741
F = TypeVar("F", bound=Callable[..., Any])
_Args: TypeAlias = Sequence[Tree]
_Kwargs: TypeAlias = "dict[str, Tree] | None"
_Run: TypeAlias = "RunOptions | None"
_Axis: TypeAlias = "int | tuple[int, ...] | None"
_Container: TypeAlias = "tuple[Any, ...] | list[Any] | dict[Any, Any]"

ONE_DEFAULT = (
    "There is one default strategy; torchstrategy.get_strategy() returns it outside "
    "any scope."
)


def _says_axis(reduce: F) -> F:
    """`Strategy.reduce`, which says what to write to somebody who left out `axis`."""

    @wraps(reduce)
    def check_and_reduce(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and "axis" not in kwargs:
            call = (
                f'strategy.reduce("{args[1]}", value, axis='
                if isinstance(args[1], str)
                else "reduce(op, value, axis="
            )
            raise TypeError(
                f"reduce({args[1]!r}, value) does not say over what: give it axis. "
                "Write\n"
                f"  {call}None)      over replicas, as for a loss of each; for a mean "
                "over rows also weights=batch\n"
                f"  {call}0)         over the rows of all replicas, as for a loss of "
                "each row"
            )
        return reduce(*args, **kwargs)

    return cast(F, check_and_reduce)


class _Entry(NamedTuple):
    """One entry into a scope that was not left yet."""

    thread: int
    frame: Frame | None  # the current one of the thread, right after it
    stack: ExitStack  # what leaving undoes


@final
class StrategyScope(Generic[S]):
    """What `Strategy.scope` returns.

    May be entered several times, also within itself.
    """

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._entries: list[_Entry] = []

    def __enter__(self) -> S:
        strategy, current = self._strategy, current_frame()
        with ExitStack() as stack:
            if not is_default(strategy):
                require_cross_replica(strategy, "Strategy.scope")
                stack.enter_context(Frame(strategy))
                stack.enter_context(strategy.extended._creation_scope())
            elif current is not None and not is_default(current.strategy):
                raise RuntimeError(
                    "Must not nest the default strategy's scope in the scope of "
                    f"{current.strategy!r}. Leave that scope: outside of scopes the "
                    "default strategy is the current one."
                )
            self._entries.append(_Entry(get_ident(), current_frame(), stack.pop_all()))
        return strategy

    def __exit__(self, *exception: Any) -> None:
        thread, frame = get_ident(), current_frame()
        here = [
            entry
            for entry in self._entries
            if entry.thread == thread and entry.frame is frame
        ]
        if not here:
            raise RuntimeError(
                f"Scope nesting error: the scope of {self._strategy!r} was left, and "
                "it is not the one that was entered last on this thread. Leave scopes "
                "in the reverse order of entering them; `with` does."
            )
        last = here[-1]
        self._entries.remove(last)
        last.stack.__exit__(*exception)


class StrategyBase:
    """What `torchstrategy.Strategy` and `torchstrategy.compat.v1.Strategy` share.

    The two classes have nearly all methods in common.

    Args:
        extended: How this strategy does it.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        extended._bind(self)

    def __copy__(self) -> Self:
        raise RuntimeError(
            "Must only deepcopy a Strategy: a shallow copy would share the replicas of "
            "the first."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if is_default(self):
            raise RuntimeError(ONE_DEFAULT)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(
            copy.deepcopy(
                {k: v for k, v in vars(self).items() if k != "_extended"}, memo
            )
        )
        StrategyBase.__init__(copied, copy.deepcopy(self._extended, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(
            self,
            "its replicas are threads of this process. Save model.state_dict() and "
            "optimizer.state_dict(), and make the strategy anew. An object that holds "
            "a strategy leaves it out of its pickle, in __getstate__.",
        )

    def __repr__(self) -> str:
        facts = []
        # The strategy is being made, or has no devices.
        with suppress(AttributeError, RuntimeError):
            facts.append(plural(self.num_replicas_in_sync, "replica"))
            workers = self._extended._workers.count
            of_each = f" of each of {workers} workers" if workers > 1 else ""
            facts[0] += f" on {_list_devices(self._extended.worker_devices)}{of_each}"
            facts.append(
                f"parameters on {_list_devices(self._extended.parameter_devices)}"
            )
        return f"{type(self).__name__}({', '.join(facts)})"

    if not TYPE_CHECKING:  # a type checker shall not take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property failed: this second look-up raises its own error.
                return object.__getattribute__(self, name)
            meant = did_you_mean(name, dir(type(self)))
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}.{meant}",
                name=name,
                obj=self,
            )

    @property
    def extended(self) -> StrategyExtended:
        """What libraries built on strategies need, and training scripts do not."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas a step is run in."""
        return self._extended._num_replicas_in_sync

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that knows the processes of a strategy over several processes.

        It is None if all replicas are in this process.
        """
        return self._extended._cluster_resolver

    def scope(self) -> StrategyScope[Self]:
        """A context manager: models you create in it belong to this strategy.

        So do optimizers and variables. In the block, this strategy is the current one.

        You can use what you create in the block in the step as it is. You may enter the
        scope again, also within itself.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> with strategy.scope() as current:
            ...     current is strategy is torchstrategy.get_strategy()
            True

        Raises:
            RuntimeError: When it is entered in the scope of another strategy, or in a
                replica.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#scope
        """
        return StrategyScope(self)

    # For type checkers: of containers each leaf may become a `PerReplica`, for which
    # there is no type.
    @overload
    def run(
        self,
        fn: Callable[..., _Container],
        args: _Args = ...,
        kwargs: _Kwargs = ...,
        options: _Run = ...,
    ) -> Any: ...
    @overload
    def run(
        self,
        fn: Callable[..., None],
        args: _Args = ...,
        kwargs: _Kwargs = ...,
        options: _Run = ...,
    ) -> None: ...
    @overload
    def run(
        self,
        fn: Callable[..., T],
        args: _Args = ...,
        kwargs: _Kwargs = ...,
        options: _Run = ...,
    ) -> T | PerReplica[T]: ...
    def run(
        self,
        fn: ReplicaFn,
        args: _Args = (),
        kwargs: _Kwargs = None,
        options: _Run = None,
    ) -> Tree:
        """Calls `fn` once in each replica and returns what the calls returned.

        Each replica receives its own component of any distributed argument. What the
        replicas return is put together leaf by leaf. If all replicas return the same
        object, you get it; otherwise a `DistributedValues`. With one replica there is
        nothing to put together, and plain values come back.

        In a replica, a module or an optimizer of this strategy *is* the replica's own.
        After the run the parameters' `.grad` hold the gradient that plain PyTorch
        computes with the same step for the whole batch: the replicas' gradients are
        averaged, each weighing the rows that it got, and added to what was there.
        `optimizer.step()` in the step is taken once for all replicas, when each of them
        has come to it.

        What the step writes on a trainer, an object that holds models or optimizers, is
        the replica's own: `self.fake = self.generator(noise)`. After the run, an
        attribute that is equal in all replicas, such as a counter, has that value. Any
        other attribute is a `DistributedValues`, and in the next run each replica finds
        its component there. All replicas share lists, dicts and variables.

        Replicas on one device run one after the other, in order. The next one gets its
        turn only where a replica synchronizes or ends, so a run with the same seed
        gives the same numbers. Replica 0 draws from the caller's random generator, and
        each other replica from a stream derived from it.

        A replica that got no rows sits the step out: it has no component in the result.

        If a replica raises, the others are stopped and the very same exception comes
        out of `run`, with a note that names the replica. If no update had begun,
        parameters, gradients, buffers and the optimizer's state are then what they were
        before. A completed update stays. An update that fails halfway leaves the
        parameters half updated, as in plain PyTorch. A write of the step on a parameter
        is refused only afterwards: the value stays changed.

        The traceback has the call of `run` and then the lines of the step. With
        `TORCHSTRATEGY_FULL_TRACEBACK=1` in the environment, what is between them is
        shown, too.

        Args:
            fn: The step.
            args: Its positional arguments: a tuple or list.
            kwargs: Its keyword arguments.
            options: See `RunOptions`.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> def value_fn(context):
            ...     return torch.tensor(10.0 * context.replica_id_in_sync_group)
            >>> values = strategy.experimental_distribute_values_from_function(value_fn)
            >>> strategy.run(lambda x, y: x + y, args=(values, 1))
            PerReplica:{
              0: 1.0,
              1: 11.0
            }

        Differs from tf.distribute:
            Gradients arrive in the parameters. An empty replica sits out
            (`RunOptions(run_empty_replicas=True)` runs it). A value with more
            components than there are replicas is refused.

        Raises:
            ValueError: If `args` is neither a tuple nor a list, the replicas return
                different structures, or a value has another number of components than
                there are replicas.
            RuntimeError: If called in a replica or in another strategy's scope, or if
                the replicas synchronize a different number of times.
            TypeError: If `fn` cannot be called.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#run
        """
        try:
            _check_run(args, kwargs, options)
        except (TypeError, ValueError) as error:
            self._extended._refuse_run(error)
            raise
        require_cross_replica(self, "Strategy.run")
        own_args, own_kwargs, chosen = (
            tuple(args),
            dict(kwargs or {}),
            options or NO_OPTIONS,
        )
        try:
            if not is_profiling():
                return self._extended._run(fn, own_args, own_kwargs, chosen)
            with traced("run {}", fn):
                return self._extended._run(fn, own_args, own_kwargs, chosen)
        except BaseException as error:
            __tracebackhide__ = True  # pytest knows this name
            hide_frames(error)
            raise

    def experimental_run_v2(
        self,
        fn: ReplicaFn,
        args: _Args = (),
        kwargs: _Kwargs = None,
        options: _Run = None,
    ) -> Tree:
        """The name that `run` had before TensorFlow 2.2.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#run
        """
        return self.run(fn, args, kwargs, options)

    def experimental_run(
        self,
        fn: ReplicaFn,
        input_iterator: InputIterator | DistributedIterator | None = None,
    ) -> Tree:
        """Runs `fn` with the next batch of an iterator as its one argument.

        Without an iterator, `fn` gets no argument.

        A batch that is a tuple is one argument, too.

        Example:
            >>> strategy = torchstrategy.compat.v1.OneDeviceStrategy("cpu")
            >>> iterator = strategy.make_dataset_iterator([torch.ones(2)])
            >>> strategy.experimental_run(lambda batch: batch * 2, iterator)
            tensor([2., 2.])

        Raises:
            OutOfRangeError: If there is no other batch.
            TypeError: If `input_iterator` has no `get_next()`.
            RuntimeError: As `run`; then no batch is taken.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_run
        """
        require_cross_replica(self, "Strategy.experimental_run")
        return self.run(
            fn, () if input_iterator is None else (next_of(input_iterator),)
        )

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """`experimental_distribute_dataset` with one iterator, which can begin again.

        Example:
            >>> strategy = torchstrategy.compat.v1.experimental.CentralStorageStrategy(
            ...     ["cpu", "cpu"]
            ... )
            >>> iterator = strategy.make_dataset_iterator([torch.ones(3)])
            >>> iterator.initialize()
            >>> strategy.experimental_run(len, iterator).values
            (2, 1)

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#make_dataset_iterator
        """
        return InputIterator(
            self._extended._distribute_dataset(dataset, InputOptions())
        )

    def make_input_fn_iterator(
        self,
        input_fn: DatasetFn,
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """`distribute_datasets_from_function` with one iterator, which can begin again.

        Args:
            input_fn: Called with an `InputContext`, now and once, in the scope of this
                strategy. Returns a dataset, or a function that is called for each
                element, without end unless it raises.
            replication_mode: `PER_WORKER`.

        Example:
            >>> strategy = torchstrategy.compat.v1.experimental.CentralStorageStrategy(
            ...     ["cpu", "cpu"]
            ... )
            >>> iterator = strategy.make_input_fn_iterator(
            ...     lambda context: [torch.zeros(2), torch.ones(2)]
            ... )
            >>> strategy.experimental_run(
            ...     lambda batch: int(batch.sum()), iterator
            ... ).values
            (0, 2)

        Differs from tf.distribute:
            No element is lost where the data runs out in the middle of a step.

        Raises:
            ValueError: If `input_fn` returns neither, or `replication_mode` is another
                one.
            TypeError: If `input_fn` cannot be called with a context.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#make_input_fn_iterator
        """
        require_cross_replica(self, "Strategy.make_input_fn_iterator")
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"Input replication mode not supported: {replication_mode!r}. "
                "make_input_fn_iterator calls input_fn once; "
                "distribute_datasets_from_function can call a function for each "
                "replica."
            )
        _require_dataset_fn("input_fn", input_fn)
        with self.scope():
            return InputIterator(
                self._extended._distribute_from_function(
                    from_input_fn(input_fn), InputOptions()
                )
            )

    def update_config_proto(self, config_proto: T) -> T:
        """A copy of a configuration.

        There are no sessions to configure here, and it is left as it is.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#update_config_proto
        """
        return copy.deepcopy(config_proto)

    @overload
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: torch.Tensor | PerReplica[Any],
        axis: _Axis,
        weights: Any = ...,
    ) -> torch.Tensor: ...
    @overload
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: dict[Any, Any],
        axis: _Axis,
        weights: Any = ...,
    ) -> dict[Any, Any]: ...
    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: object, axis: _Axis, weights: Any = ...
    ) -> Any: ...
    @_says_axis
    def reduce(
        self, reduce_op: ReduceOp | str, value: Tree, axis: _Axis, weights: Tree = None
    ) -> Tree:
        """The sum or mean of a value over the replicas.

        If you give `axis`, the sum or mean is also taken along that axis in each
        replica.

        `reduce(MEAN, losses, axis=0)` of per-example losses is the mean over all
        examples, also of an uneven batch. `reduce(MEAN, loss, axis=None,
        weights=batch)` of a loss that each replica averaged over its rows is that mean,
        too. Without `weights`, `axis=None` is the unweighted mean over the replicas
        that are present, which is another number if the batch is uneven.

        Args:
            reduce_op: `SUM` or `MEAN`. The mean of integers is of torch's default
                floating dtype.
            value: What `run` returned; containers and dataclasses are reduced leaf by
                leaf. A plain tensor counts as the same in every replica: its `MEAN` is
                itself, and without `axis` its `SUM` is refused.
            axis: None, or along which dimension (or dimensions) of each component,
                whose sizes may differ.
            weights: How much each replica weighs in a `MEAN` with `axis=None`: the
                batch of the step, whose rows count; or a number for each replica of
                this process, which `run` may have returned, such as a count of tokens.
                None: all weigh the same. The result has no gradient.

        Returns:
            Tensors on the parameter device.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=6)
            >>> batch = next(iter(strategy.experimental_distribute_dataset(loader)))
            >>> strategy.reduce("sum", batch, axis=None)
            tensor([3., 5., 7.])
            >>> strategy.reduce("mean", batch, axis=0)
            tensor(2.5000)
            >>> dataset = strategy.experimental_distribute_dataset([torch.arange(5.0)])
            >>> batch = next(iter(dataset))
            >>> means = strategy.run(torch.mean, args=(batch,))  # 1.0 of 3, 3.5 of 2
            >>> strategy.reduce("mean", means, axis=None, weights=batch)
            tensor(2.)

        Differs from tf.distribute:
            Containers are mapped. The mean of integers is float32, not float64.
            `weights` is ours.

        Raises:
            ValueError: If shapes do not fit, there is no such axis, the reduction is
                unknown, or a value that is not distributed is summed over several
                replicas; if `weights` do not fit, or come with a `SUM` or an `axis`.
            TypeError: If `reduce_op` or `axis` is of the wrong kind.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#reduce
        """
        require_cross_replica(self, "Strategy.reduce", instead="all_reduce()")
        with self._extended._exchanging("strategy.reduce"):
            op, axis = ReduceOp.of(reduce_op), None if axis == () else axis
            self._extended._agree_on_parts(lambda: paths_of_results(value))
            if weights is not None:
                if op is not ReduceOp.MEAN or axis is not None:
                    raise ValueError(
                        "weights=... weighs the replicas in a mean, and this is a "
                        f"{op.value} along axis={axis}, in which every row counts "
                        "once. Leave them out, or write "
                        'reduce("mean", value, axis=None, weights=batch).'
                    )
                return map_results(
                    lambda leaf: self._extended._weighted_mean(leaf, weights), value
                )
            if axis is None:
                return self._extended._reduce_nested(op, value)
            return map_results(
                lambda leaf: self._extended._reduce_along_axis(op, leaf, axis), value
            )

    def count_rows(self, batch: Tree) -> int:
        """How many rows a batch has in all replicas of all workers together.

        It is the same line for one device and for many. It waits for no accelerator.
        Under several workers all call it, as they call `reduce`.

        Args:
            batch: A batch that this strategy split, a part of one, or what `run`
                returned for each row. A batch that is not distributed counts as it is.

        Example:
            >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
            >>> total, count = torch.zeros(()), 0
            >>> batches = [torch.ones(7, 3), torch.ones(4, 3)]
            >>> for batch in strategy.experimental_distribute_dataset(batches):
            ...     loss = strategy.run(torch.mean, args=(batch,))
            ...     rows = strategy.count_rows(batch)
            ...     mean = strategy.reduce("mean", loss, axis=None, weights=batch)
            ...     total += rows * mean
            ...     count += rows
            >>> count, (total / count).item()
            (11, 1.0)

        Differs from tf.distribute:
            It is ours.

        Raises:
            ValueError: If nothing in it has rows, or its parts have different numbers
                of them.
            TypeError: If it is not known what the rows of a part are.
            RuntimeError: If called in a replica (use `len` there) or in another
                strategy's scope.
        """
        require_cross_replica(self, "Strategy.count_rows", instead="len()")
        with self._extended._exchanging("strategy.count_rows"):
            return self._extended._count_rows(batch)

    def barrier(self) -> None:
        """Waits until all workers have come here.

        A process that trains alone goes on at once.

        Outside of the step, it keeps the others from reading a file before one worker
        has written it.

        Example:
            >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
            >>> if strategy.extended.should_checkpoint:
            ...     print("one worker writes")
            one worker writes
            >>> strategy.barrier()  # the others wait here until it has

        Differs from tf.distribute:
            It is ours.

        Raises:
            WorkerError: If a worker is gone, hangs, or is somewhere else in the
                program.
            RuntimeError: If called in a replica or in another strategy's scope.
        """
        require_cross_replica(self, "Strategy.barrier")
        with self._extended._exchanging("strategy.barrier"):
            self._extended._workers.all_gather_object(None, "strategy.barrier")

    def experimental_distribute_dataset(
        self, dataset: Iterable[T] | Dataset[T], options: InputOptions | None = None
    ) -> DistributedDataset[T]:
        """Splits each batch of `dataset` among the replicas.

        A batch of b rows is cut into contiguous pieces of ceil(b / n) rows, one for
        each of the n replicas, in order; the last ones may be smaller or empty. No row
        is dropped or repeated, and batches are not mixed. What has no rows, a number,
        None, a tensor without dimensions, each replica is given whole.

        A loader with workers is read ahead on a background thread, and any other on the
        caller's, when the next batch is asked for; see `InputOptions`. Copies to
        accelerators are made from pinned memory on a stream of their own.

        Args:
            dataset: A `torch.utils.data.DataLoader`, or another iterable of batches,
                made for the global batch size. A batch is a tensor, a numpy array, a
                `PackedSequence`, a list with a thing for each row (strings, say), an
                object of a type that `register_batch_type` was told of, a dataclass of
                these, or lists, tuples, named tuples and dicts of these to any depth.
            options: How it is read, and how it is cut.

        Returns:
            A `DistributedDataset`, which splits the batches each time it is iterated
            over: containers as the loader makes them, with a `DistributedValues` for
            each tensor, on the replicas' devices. With one replica, plain tensors. The
            default strategy returns `dataset` itself.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> loader = torch.utils.data.DataLoader(torch.arange(3), batch_size=3)
            >>> for batch in strategy.experimental_distribute_dataset(loader):
            ...     print(batch)
            PerReplica:{
              0: tensor([0, 1]),
              1: tensor([2])
            }

        Differs from tf.distribute:
            Tensors of one batch must have the same number of rows.

        Raises:
            TypeError: If `dataset` cannot be iterated over; while iterating, if it is
                not known how to cut a value.
            ValueError: If `options` do not fit this strategy; while iterating, if a
                batch has no rows or values with different numbers of rows.
            NotImplementedError: If `options` ask for an input pipeline for each
                replica.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#experimental_distribute_dataset
        """
        return self._extended._distribute_dataset(dataset, _input_options(options))  # type: ignore[no-any-return]

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions | None = None
    ) -> DistributedDataset[Any]:
        """Gives each replica elements of the dataset that `dataset_fn` returns, uncut.

        For a step, the replicas are given the next n elements, in order; so the dataset
        is made for the batch size of one replica. Where it runs out in the middle of a
        step, the replicas that are left get tensors without rows, and sit the step out.

        Args:
            dataset_fn: Called with an `InputContext`, now and once, on this thread.
                Returns what `experimental_distribute_dataset` takes.
            options: How the dataset is read.
                `experimental_replication_mode=PER_REPLICA` calls `dataset_fn` for each
                replica, which then reads what was made for it.

        Returns:
            A `DistributedDataset`, with a `DistributedValues` for each leaf of an
            element. With one replica, plain tensors. The default strategy returns what
            `dataset_fn` returned.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> def dataset_fn(context):
            ...     batch_size = context.get_per_replica_batch_size(4)
            ...     return torch.utils.data.DataLoader(
            ...         torch.arange(6), batch_size=batch_size
            ...     )
            >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
            ...     print(batch)
            PerReplica:{
              0: tensor([0, 1]),
              1: tensor([2, 3])
            }
            PerReplica:{
              0: tensor([4, 5]),
              1: tensor([], dtype=torch.int64)
            }

        Differs from tf.distribute:
            No element is lost at the end, which TensorFlow leaves out under some
            strategies. `PER_REPLICA` works under every strategy with replicas that
            synchronize.

        Raises:
            TypeError: If `dataset_fn` cannot be called with a context, or returns no
                dataset.
            ValueError: If `options` do not fit; while iterating, if elements differ in
                structure.
            NotImplementedError: If `PER_REPLICA` is asked of a strategy on one device.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#distribute_datasets_from_function
        """
        _require_dataset_fn("dataset_fn", dataset_fn)
        said = _input_options(options)
        return self._extended._distribute_from_function(dataset_fn, said)  # type: ignore[no-any-return]

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions | None = None
    ) -> DistributedDataset[Any]:
        """The name that `distribute_datasets_from_function` had before TensorFlow 2.4.

        Source: https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/distribute/Strategy#experimental_distribute_datasets_from_function
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_local_results(self, value: T | PerReplica[T]) -> tuple[T, ...]:
        """The components of a value, in replica order, of the present replicas.

        Args:
            value: A `DistributedValues`, or containers of them, of which each replica
                gives one. Anything else is the only result.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> strategy.experimental_local_results(strategy.run(lambda: torch.ones(1)))
            (tensor([1.]), tensor([1.]))
            >>> strategy.experimental_local_results(3)
            (3,)

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#experimental_local_results
        """
        return self._extended._local_results(value)

    def distribute_module(self, module: M) -> M:
        """Gives this strategy a module that was created outside of its scope.

        It stays the same object.

        Its parameters and buffers are moved to the parameter device. Of several
        replicas each has a copy. A function that the module holds, in an attribute or
        as a hook, closes in the copy over the parts of the copy.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> model = strategy.distribute_module(torch.nn.Linear(2, 1))

        Raises:
            TypeError: If it is not a module; if there can be no copies of it, such as
                of a ScriptModule or of a tensor with a history in an attribute. It is
                named by its path in the model.
            RuntimeError: If it belongs to another strategy, or if called in a replica
                or in another strategy's scope.
        """
        require_cross_replica(self, "Strategy.distribute_module")
        require_type(module, nn.Module, "distribute_module takes a torch.nn.Module")
        self._extended._distribute_module(module)
        return module

    def distribute_optimizer(self, optimizer: O) -> O:
        """Lets the step use an optimizer that you created outside of the scope.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> model = strategy.distribute_module(torch.nn.Linear(2, 1))
            >>> optimizer = strategy.distribute_optimizer(
            ...     torch.optim.SGD(model.parameters(), lr=0.1)
            ... )

        Raises:
            TypeError: If it is not an optimizer.
            RuntimeError: If called in a replica or in another strategy's scope.
        """
        require_cross_replica(self, "Strategy.distribute_optimizer")
        require_type(
            optimizer, Optimizer, "distribute_optimizer takes a torch.optim.Optimizer"
        )
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"This {type(optimizer).__name__} has no param_groups, so nobody can "
                "tell what it updates. Call super().__init__(params, defaults) in its "
                "__init__; or take those of the optimizer that it is around."
            )
        self._extended._distribute_optimizer(optimizer)
        return optimizer


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
        >>> loader = torch.utils.data.DataLoader(
        ...     [(torch.ones(2), torch.ones(1))] * 5, batch_size=4
        ... )
        >>> for batch in strategy.experimental_distribute_dataset(loader):
        ...     losses = strategy.run(step, args=(batch,))
        ...     mean = strategy.reduce("mean", losses, axis=0)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy
    """

    @overload
    def gather(self, value: PerReplica[list[T]] | list[T], axis: int) -> list[T]: ...
    @overload
    def gather(
        self, value: torch.Tensor | PerReplica[Any], axis: int
    ) -> torch.Tensor: ...
    @overload
    def gather(self, value: Any, axis: int) -> Any: ...
    def gather(self, value: Tree, axis: int) -> Tree:
        """The components of a value, joined along `axis` in replica order, as a tensor.

        A list with a Python object for each row, such as texts, ids or dicts of them,
        becomes a list of the rows of all replicas. The outermost list is the one of
        rows; put several such lists into a dict or a tuple.

        Args:
            value: What `run` returned, with components of at least one dimension;
                containers and dataclasses are gathered leaf by leaf. A value that is
                not distributed is returned as it is.
            axis: Along which dimension; sizes along it may differ. Negative ones count
                from the end. Of a list of Python objects it is 0.

        Returns:
            Tensors on the parameter device, and lists.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(1, 2) * 3)
            >>> strategy.gather(value, axis=0)
            tensor([[3., 3.],
                    [3., 3.]])
            >>> loader = [["one", "two", "three"]]
            >>> batch = next(iter(strategy.experimental_distribute_dataset(loader)))
            >>> def step(texts):
            ...     return [text.upper() for text in texts]
            >>> strategy.gather(strategy.run(step, args=(batch,)), axis=0)
            ['ONE', 'TWO', 'THREE']

        Differs from tf.distribute:
            Lists of Python objects are ours.

        Raises:
            ValueError: If components are scalars, differ elsewhere than along `axis`,
                or have no such axis.
            TypeError: If a component is neither a tensor nor a list; under several
                workers, if an object in a list is of a class of yours, which cannot be
                sent.
            RuntimeError: If called in a replica (use `ReplicaContext.all_gather` there)
                or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#gather
        """
        require_cross_replica(self, "Strategy.gather", instead="all_gather()")
        with self._extended._exchanging("strategy.gather"):
            self._extended._agree_on_parts(
                lambda: paths_of_results(value, is_row_list_or_one_thing)
            )
            return map_results(
                self._extended._gathering(axis), value, is_leaf=is_row_list_or_one_thing
            )

    def experimental_make_numpy_dataset(self, numpy_input: Tree) -> Dataset[Tree]:
        """A map-style dataset of the rows of arrays, which are not copied.

        Give it to a `torch.utils.data.DataLoader`.

        Args:
            numpy_input: An array; or tuples, named tuples and dicts of arrays to any
                depth, with the same number of rows. A list of arrays is one array: they
                are stacked. Tensors are fine in place of arrays.

        Returns:
            A dataset whose elements are what `numpy_input` is, with a row in place of
            each array.

        Example:
            >>> import numpy
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> dataset = strategy.experimental_make_numpy_dataset(
            ...     (numpy.arange(3.0), numpy.array([5, 6, 7]))
            ... )
            >>> len(dataset), dataset[1]
            (3, (tensor(1., dtype=torch.float64), tensor(6)))
            >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2)
            >>> dataset = strategy.experimental_distribute_dataset(loader)
            >>> numbers, labels = next(iter(dataset))
            >>> labels
            PerReplica:{
              0: tensor([5]),
              1: tensor([6])
            }

        Differs from tf.distribute:
            A change of an array is seen in the dataset. TensorFlow 2.4 has it in
            `compat.v1` only.

        Raises:
            ValueError: If arrays have no dimensions, differ in their numbers of rows,
                or cannot be stacked.
            TypeError: If something in `numpy_input` is no array.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/distribute/Strategy#experimental_make_numpy_dataset
        """
        return self._extended.experimental_make_numpy_dataset(numpy_input)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Tree]
    ) -> Tree:
        """A distributed value: `value_fn` returns the component of each replica.

        Args:
            value_fn: Called with a `ValueContext` once for each replica, in order, on
                the caller's thread. May return anything; containers have to be alike
                for all replicas.

        Returns:
            A `DistributedValues`, or containers of them; with `OneDeviceStrategy` and
            the default strategy what `value_fn` returned.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> strategy.experimental_distribute_values_from_function(
            ...     lambda c: c.replica_id_in_sync_group * 2
            ... )
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
            raise TypeError(
                "value_fn is called with a ValueContext for each replica; "
                f"{value_fn!r} cannot be called."
            )
        return self._extended._distribute_values(value_fn)

    def experimental_assign_to_logical_device(
        self, tensor: torch.Tensor, logical_device_id: int
    ) -> torch.Tensor:
        """Places a tensor on one of the logical devices of its replica.

        Here, a replica has one device, so you get the tensor back.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> strategy.experimental_assign_to_logical_device(torch.ones(2), 0)
            tensor([1., 1.])

        Differs from tf.distribute:
            TensorFlow raises NotImplementedError for every strategy but TPUStrategy.

        Raises:
            ValueError: If `logical_device_id` is not 0.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#experimental_assign_to_logical_device
        """
        if logical_device_id != 0:
            raise ValueError(
                "Each replica has 1 logical device, number 0; there is no "
                f"{logical_device_id!r}."
            )
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: torch.Tensor, partition_dimensions: Sequence[int]
    ) -> torch.Tensor:
        """Splits a tensor over the logical devices of its replica.

        Here, a replica has one device, so you get the tensor back.

        Args:
            tensor: Any tensor.
            partition_dimensions: For each dimension of the tensor, in how many parts it
                is split.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> strategy.experimental_split_to_logical_devices(torch.ones(2), [1])
            tensor([1., 1.])

        Differs from tf.distribute:
            TensorFlow raises NotImplementedError for every strategy but TPUStrategy.

        Raises:
            ValueError: If there is not one number for each dimension, one does not
                divide its dimension, or they ask for more than one part in all.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#experimental_split_to_logical_devices
        """
        parts, shape = list(partition_dimensions), tuple(tensor.shape)
        if len(parts) != len(shape):
            why = (
                f"has {plural(len(parts), 'number')} for a tensor of "
                f"{plural(len(shape), 'dimension')}"
            )
        elif any(
            part < 1 or size % part for size, part in zip(shape, parts, strict=True)
        ):
            why = f"does not divide a tensor of shape {shape}"
        elif (product := math.prod(parts)) != 1:
            why = f"asks for {product} parts"
        else:
            return tensor
        raise ValueError(
            f"partition_dimensions={parts} {why}. Each replica has 1 logical device, "
            "number 0."
        )

    def experimental_replicate_to_logical_devices(
        self, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Replicates a tensor to the logical devices of its replica.

        Here, a replica has one device, so you get the tensor back.

        Example:
            >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
            >>> strategy.experimental_replicate_to_logical_devices(torch.ones(2))
            tensor([1., 1.])

        Differs from tf.distribute:
            TensorFlow raises NotImplementedError for every strategy but TPUStrategy.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/Strategy#experimental_replicate_to_logical_devices
        """
        return tensor


def _check_run(args: object, kwargs: object, options: object) -> None:
    if not isinstance(args, (list, tuple)):
        raise ValueError(
            "positional args must be a list or tuple: args=(batch,); got a "
            f"{type(args).__name__}."
        )
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(
            f"options is a torchstrategy.RunOptions or None; got {options!r}."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs is a dict of keyword arguments; got a {type(kwargs).__name__}."
        )


def _list_devices(devices: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(map(str, devices)))


def _input_options(options: InputOptions | None) -> InputOptions:
    require_type(
        options, InputOptions | None, "options is a torchstrategy.InputOptions"
    )
    return options or InputOptions()


def _require_dataset_fn(name: str, dataset_fn: Any) -> None:
    try:
        # Some callables written in C have no signature to be seen.
        with suppress(ValueError):
            inspect.signature(dataset_fn).bind(InputContext())
    except TypeError as error:
        raise TypeError(
            f"{name} is called with one argument, an InputContext, and {dataset_fn!r} "
            f"does not take it: {error}. Write `def {name}(context): ...`; to split a "
            "dataset that you have, use experimental_distribute_dataset."
        ) from None
