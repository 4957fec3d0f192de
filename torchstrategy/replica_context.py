"""What a replica can ask and do: which one it is, and how it meets the others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from typing_extensions import Self

from torchstrategy._base.context import Frame, current_frame, current_replica_context
from torchstrategy._base.distributed_values import check_component_counts, select
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.tree import by_name, tree_flatten
from torchstrategy._base.types import Device, ReplicaContextLike, StrategyLike, Tree
from torchstrategy._group.group import ALONE, ReplicaGroup
from torchstrategy._group.reductions import as_axis, as_tensor
from torchstrategy._group.workers import refusing
from torchstrategy._parity.options import CommunicationOptions, as_options, check_usable
from torchstrategy.strategy import Strategy

# A block in which a merge function runs, and what makes of a replica's function one
# over the user's own objects.
Published = AbstractContextManager[Callable[[Any], Any] | None]


@final
class ReplicaContext:
    """The replica that a step runs in.

    Ask for it with `torchstrategy.get_replica_context()`.

    It belongs to one call of the step: kept longer, it can still be asked who it was,
    and nothing more. A strategy of one's own makes one and calls the step in it: `with
    ReplicaContext(strategy, 0): ...`. Such a replica has nobody to synchronize with.

    Args:
        strategy: The strategy whose replica it is.
        replica_id_in_sync_group: Which of its replicas, from 0.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> def step():
        ...     context = torchstrategy.get_replica_context()
        ...     mine = torch.tensor(float(context.replica_id_in_sync_group + 1))
        ...     return context.all_reduce("sum", mine)
        >>> strategy.run(step)
        PerReplica:{
          0: 3.0,
          1: 3.0
        }

    Differs from tf.distribute:
        `replica_id_in_sync_group` is an int, not a tensor; `devices` is a tuple of one
        `torch.device`.

    Raises:
        ValueError: If `replica_id_in_sync_group` is not an integer.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/ReplicaContext
    """

    def __init__(self, strategy: StrategyLike, replica_id_in_sync_group: int) -> None:
        try:
            self._replica_id = operator.index(replica_id_in_sync_group)
        except TypeError:
            raise ValueError(
                f"A replica id is an integer; got {replica_id_in_sync_group!r}."
            ) from None
        self._strategy = strategy
        self._group: ReplicaGroup | None = None
        self._published: Callable[[], Published] = nullcontext
        self._is_over = False
        self._alone = (
            "was entered by hand: bring the replicas' results together after run"
        )
        self._entries: list[Frame] = []  # of a context that is entered by hand

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        # It is a strategy of compat.v1 only in the replicas of that strategy.
        return self._strategy  # type: ignore[return-value]

    @property
    def replica_id_in_sync_group(self) -> int:
        """Which replica this is, from 0."""
        if self._group is not None:
            self._group.replica.was_asked = True
        return self._replica_id

    @property
    def is_first_replica(self) -> bool:
        """Whether this is the first replica that takes part in the step.

        Exactly one replica of all workers is the first.

        `if context.is_first_replica:` is how a step prints, counts or writes a file
        once.
        """
        if self._group is None:
            return self._replica_id == 0
        return (
            self._group.workers.index == 0
            and self._group.replica.index == self._group.participants.present[0]
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the strategy has, those that sit this step out included."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of this replica, in a tuple.

        Raises:
            RuntimeError: If this is not the replica that the caller is in.
        """
        self._require_here("devices")
        return (self._strategy.extended._device_of(self._replica_id),)

    def merge_call(
        self,
        merge_fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Any = None,
    ) -> Tree:
        """Calls `merge_fn(strategy, *args, **kwargs)` once for all replicas.

        This is a synchronization point: each replica waits until all have come.

        `merge_fn` runs in the cross-replica context, on the thread that called `run`.
        Its arguments are those of all replicas, joined as `run` joins results. A
        distributed value in its result comes back as this replica's component.

        Args:
            merge_fn: What to call. Replicas that pass different functions get that of
                the lowest.
            args: Its positional arguments after the strategy.
            kwargs: Its keyword arguments.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> def step(value):
            ...     context = torchstrategy.get_replica_context()
            ...     return context.merge_call(
            ...         lambda strategy, v: strategy.reduce("sum", v, axis=None),
            ...         args=(value,),
            ...     )
            >>> strategy.run(lambda: step(torch.tensor(1.0) * 1))
            tensor(2.)

        Raises:
            RuntimeError: If this is not the replica that the caller is in; from `run`,
                if not every replica makes the call.
            ValueError: If the replicas' arguments differ in structure.
        """
        group = self._require_active("merge_call")

        def combine(brought: Sequence[Tree]) -> list[Tree]:
            trees = dict(zip(group.participants.present, brought, strict=True))
            with refusing():
                merged_args, merged_kwargs = group.participants.regroup(
                    trees, group.workers
                )
            with Frame(self._strategy), self._published() as for_all:
                function = merge_fn if for_all is None else for_all(merge_fn)
                result = function(self._strategy, *merged_args, **merged_kwargs)
            check_component_counts(tree_flatten(result)[0], len(group.devices))
            return [select(result, r) for r in group.participants.present]

        with refusing():
            given = tuple(args), dict(kwargs or {})
        return group.replica.synchronize("merge_call", combine, given)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        options: CommunicationOptions | None = None,
    ) -> Tree:
        """Waits for the other replicas, and returns the sum or mean of their values.

        The value may be nested: a tuple, a list or a dict of tensors.

        Each replica gets a tensor of its own. Gradients flow through it, scaled by the
        replicas' shares in the gradient: see `RunOptions`.

        Args:
            reduce_op: `SUM`, or `MEAN` over the replicas that take part. The mean of
                integers is of torch's default dtype.
            value: A tensor or number, or containers of them: in every replica of the
                same shapes and dtypes.
            options: How values are sent.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> def step():
            ...     context = torchstrategy.get_replica_context()
            ...     return context.all_reduce("mean", {"x": torch.ones(2)})["x"]
            >>> strategy.run(step)
            PerReplica:{
              0: tensor([1., 1.]),
              1: tensor([1., 1.])
            }

        Raises:
            RuntimeError: If this is not the replica that the caller is in; from `run`,
                if not every replica makes the call.
            ValueError: If shapes or dtypes differ, `reduce_op` names no reduction, or
                an option asks for what cannot be done.
            TypeError: If a value cannot be added.
        """
        group = self._require_active("all_reduce")

        def devices() -> list[Device]:
            return [
                self._strategy.extended._device_of(r)
                for r in group.participants.present
            ]

        with refusing():
            op = ReduceOp.of(reduce_op)
            said = as_options("all_reduce", options)
            check_usable("all_reduce", said, devices)
            names, leaves, put_back = by_name(value)
            tensors = [as_tensor(leaf) for leaf in leaves]
        if not leaves:
            return value
        sums = group.with_buckets(said.bytes_per_pack).all_reduce(
            tensors, names, f"all_reduce({op.value})"
        )
        if op is ReduceOp.MEAN and self.num_replicas_in_sync > 1:
            sums = [total / group.participants.count for total in sums]
        return put_back(sums)

    def all_gather(
        self, value: Tree, axis: int, options: CommunicationOptions | None = None
    ) -> Tree:
        """Waits for the other replicas, and returns their values joined along `axis`.

        The values may be nested: a tuple, a list or a dict of tensors.

        Sizes along `axis` may differ. Gradients flow through it.

        Args:
            value: A tensor of at least one dimension, or containers of them.
            axis: Along which dimension; negative ones count from the end.
            options: How values are sent.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> def step():
            ...     context = torchstrategy.get_replica_context()
            ...     return context.all_gather(torch.ones(1, 2), axis=0).shape
            >>> strategy.run(step)
            PerReplica:{
              0: torch.Size([2, 2]),
              1: torch.Size([2, 2])
            }

        Raises:
            RuntimeError: If this is not the replica that the caller is in; from `run`,
                if not every replica makes the call.
            ValueError: If a value is a scalar, two differ elsewhere than along `axis`,
                there is no such axis, or an option asks for what cannot be done.
        """
        group = self._require_active("all_gather")
        with refusing():
            said = as_options("all_gather", options)
            check_usable("all_gather", said)
            names, leaves, put_back = by_name(value)
            tensors, along = [as_tensor(leaf) for leaf in leaves], as_axis(axis)
        return put_back(
            group.with_buckets(said.bytes_per_pack).all_gather(tensors, along, names)
        )

    def __enter__(self) -> Self:
        entry = Frame(self._strategy, self)
        entry.__enter__()
        self._entries.append(entry)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entries.pop().__exit__(*exception)

    def __repr__(self) -> str:
        return (
            f"<torchstrategy.ReplicaContext {self._replica_id} of "
            f"{self.num_replicas_in_sync}>"
        )

    def _ends(self) -> None:
        """The call of the step is over: the replica cannot synchronize any more."""
        # A context may be kept, and must not keep the run.
        self._group, self._published, self._is_over = None, nullcontext, True

    def _require_active(self, what: str) -> ReplicaGroup:
        self._require_here(what, can_synchronize=not self._is_over)
        if self._group is None and self.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"{what} is where replicas synchronize, and replica {self._replica_id} "
                f"of {self.num_replicas_in_sync} of {self._strategy!r} {self._alone}."
            )
        if self._group is not None:
            self._group.replica.num_calls += 1
        return self._group or ALONE

    def _require_here(self, what: str, can_synchronize: bool = True) -> None:
        if current_replica_context() is not self or not can_synchronize:
            frame = current_frame()
            where = (
                "in the cross-replica context"
                if frame and frame.replica_context is None
                else "elsewhere"
            )
            raise RuntimeError(
                f"Mismatching replica context: {what} was called on replica "
                f"{self._replica_id}, and the caller is {where}. A context is good for "
                "one call of the step: ask torchstrategy.get_replica_context() in it."
            )


def get_replica_context() -> ReplicaContext | None:
    """The caller's replica; None exactly when `in_cross_replica_context()`.

    Outside of every scope, it is the only replica of the default strategy.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> ids = strategy.run(
        ...     lambda: torchstrategy.get_replica_context().replica_id_in_sync_group
        ... )
        >>> strategy.experimental_local_results(ids)
        (0, 1)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/get_replica_context
    """
    return current_replica_context()  # type: ignore[return-value]


def running_context(
    strategy: StrategyLike,
    group: ReplicaGroup,
    published: Callable[[], Published] = nullcontext,
) -> ReplicaContext:
    """The context of a replica that runs.

    Args:
        strategy: The strategy whose replica it is.
        group: The replicas of the run.
        published: A block in which a merge function runs: there, the parameters of the
            user's own model have the gradients. It may give a function that makes, of a
            replica's function, one over the user's own objects.
    """
    context = ReplicaContext(
        strategy, group.workers.index * len(group.devices) + group.replica.index
    )
    context._group, context._published = group, published
    return context


def counting_context(strategy: StrategyLike, replica: int) -> ReplicaContext:
    """The context of a replica that is asked how much it counts, before its step."""
    context = ReplicaContext(strategy, replica)
    context._alone = (
        "is asked how much it counts: examples= tells its own number, and the strategy "
        "adds up those of all"
    )
    return context


@final
class LoneFrame(Frame):
    """The frame of the only replica in its process, which uses the user's own objects.

    Its context is made when somebody asks for it, which few steps do.

    Args:
        strategy: The strategy that the thread has entered.
        make_group: Makes the group in which the replica synchronizes with others. None:
            there are no others.
    """

    __slots__ = ("_make_group",)

    def __init__(
        self,
        strategy: StrategyLike,
        make_group: Callable[[], ReplicaGroup] | None = None,
    ) -> None:
        # As `Frame` does, without a call: each run makes one.
        self.strategy, self._replica_context, self.local_objects = strategy, None, {}
        self.takes_turns, self._make_group = False, make_group

    @property
    def replica_context(self) -> ReplicaContextLike:
        if self._replica_context is None:
            group = ALONE if self._make_group is None else self._make_group()
            self._replica_context = running_context(self.strategy, group)
        return self._replica_context

    def ends(self) -> None:
        """The step has ended: a context that was kept cannot synchronize any more."""
        if self._replica_context is not None:
            self._replica_context._ends()


def refuse_unfinished(result: object) -> None:
    """Refuses what a step returns that has not run yet.

    Raises:
        TypeError: If it is a generator or a coroutine.
    """
    if isinstance(result, (Generator, Coroutine)):
        result.close()
        raise TypeError(_NOT_RUN.format(type(result).__name__))


_NOT_RUN = (
    "The step is a function with yield, or an async one: its call returned a {}, and "
    "ran nothing yet. Whoever runs it later runs it on your own objects, once for each "
    "replica. Let the step do its work and return what it made."
)
