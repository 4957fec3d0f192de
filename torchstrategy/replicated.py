"""Strategies of several replicas, in one process or more, and how they run a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self

from torchstrategy._base import distributed_values
from torchstrategy._base.context import (
    Frame,
    is_accelerator,
    is_in_replica,
    needs_device_context,
    remember_frames,
    this_thread,
    using_device,
)
from torchstrategy._base.devices import memory_device
from torchstrategy._base.distributed_values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    check_component_counts,
)
from torchstrategy._base.errors import require_type
from torchstrategy._base.objects.module_traversal import move
from torchstrategy._base.options import ReduceOp, RunOptions
from torchstrategy._base.plain import PLAIN
from torchstrategy._base.row_lists import own_rows
from torchstrategy._base.torch_internals import (
    are_parametrizations_cached,
    parametrizations_computed_anew,
)
from torchstrategy._base.trace import traced
from torchstrategy._base.tree import by_name, map_leaves, tree_flatten, tree_leaves
from torchstrategy._base.types import Device, ReplicaFn, Tree
from torchstrategy._copies.replicated_run import ReplicatedRun
from torchstrategy._copies.replicated_storage import ReplicatedStorage
from torchstrategy._data.dataset import distribute_dataset, distribute_from_function
from torchstrategy._data.options import DatasetFn, InputOptions
from torchstrategy._data.same_rows import mention_reads
from torchstrategy._group.device_streams import DeviceStreams
from torchstrategy._group.group import Replica, ReplicaGroup
from torchstrategy._group.instruments import call_step_alone
from torchstrategy._group.participants import Participants
from torchstrategy._group.reductions import (
    as_axis,
    as_tensor,
    gather_values,
    reduce_values,
)
from torchstrategy._group.replica_threads import Replicas
from torchstrategy._group.workers import Workers
from torchstrategy._parity.cross_device_ops import ON_ONE_DEVICE, CrossDeviceOps
from torchstrategy._parity.options import (
    USUAL_OPTIONS,
    CommunicationOptions,
    check_usable,
)
from torchstrategy._run import given_values
from torchstrategy._run.example_counts import count_examples
from torchstrategy._run.lone_replica import run_on_own_objects
from torchstrategy._run.own.own_objects import OwnObjects
from torchstrategy._run.run_losses import RunLosses
from torchstrategy._run.storage import Storage
from torchstrategy._turns.run import Surroundings, TurnsRun
from torchstrategy._turns.storage import SharedObjects
from torchstrategy._variables.kinds import MirroredVariable
from torchstrategy._variables.variable import Variable
from torchstrategy.extended import StrategyExtended
from torchstrategy.replica_context import LoneFrame, refuse_unfinished, running_context


class ReplicatedExtended(StrategyExtended):
    """Several replicas, or a single one.

    Each gets its part of a batch, and their results are put together.

    Args:
        storage: Where parameters live, on which devices replicas run, and which
            processes train together.
        gradient_reduction: How the gradients of the replicas become one, where a run
            does not say.
        ops: How `reduce` and the like bring values together on the parameter device.
        examples: A function that says how much a replica counts, where a run does not
            say.
    """

    # Whether a lone replica gets lists and dicts of its own, as several replicas do.
    _makes_containers = True

    def __init__(
        self,
        storage: Storage,
        gradient_reduction: ReduceOp | str | None = ReduceOp.MEAN,
        ops: CrossDeviceOps = ON_ONE_DEVICE,
        examples: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self._storage = storage
        self._workers, self._streams = (
            storage.placement.workers,
            storage.placement.streams,
        )
        # All workers have the same number of replicas.
        self._num_local = len(storage.devices)
        self._replicas = Replicas(
            storage.devices, self._workers.index * self._num_local
        )
        self._losses = RunLosses(
            gradient_reduction, self._workers, self._num_local, examples is not None
        )
        self._gradient_reduction = self._losses.reduction
        self._examples = examples
        self._ops = ops
        # Where a lone replica runs; None: wherever the caller is.
        self._alone_on: Device | None = storage.devices[0]
        self._owns = storage.owns
        self._accelerators = list(
            filter(is_accelerator, (*storage.devices, storage.parameter_device))
        )
        # The side streams that the steps of the last run have used.
        self._side_streams: tuple[torch.Stream, ...] = ()
        # Whether a run is under way, where there are several workers.
        self._is_running = False

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        return self._storage.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        return self._storage.parameter_devices

    @property
    def experimental_between_graph(self) -> bool:
        return not self._storage.placement.is_mirrored

    def variable_created_in_scope(self, v: nn.Module | torch.Tensor) -> bool:
        require_type(
            v,
            nn.Module | torch.Tensor,
            "variable_created_in_scope asks about a module or a parameter",
        )
        return self._owns(self.value_container(v))

    def _take_variable(self, variable: Variable) -> None:
        self._storage.take_variable(variable)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._num_local * self._workers.count

    def _device_of(self, replica: int) -> Device:
        return self._storage.devices[replica % self._num_local]

    # Note [The story of a step]
    # 1. Compute the weights: how much each replica counts follows from its rows, or
    #    from `RunOptions` (`_group/participants`).
    # 2. Begin the run: each replica gets copies that have the user's latest values.
    #    Where the step says `model`, it gets the copy of its replica
    #    (`_copies/replicated_storage`; Note [The order of a run and of its undoing]
    #    there tells what undoes it).
    # 3. Call the step in each replica: on this thread, and on threads of their own
    #    where replicas have to wait for one another (`_group/replica_threads`).
    # 4. Synchronize: at `optimizer.step()`, `all_reduce` and the like all replicas
    #    stand still while one function runs for them on this thread. At
    #    `optimizer.step()` gradients become one (`_copies/gradients/gradient_reducer`).
    # 5. Regroup: what the replicas returned becomes one result
    #    (`_base/distributed_values`).
    # 6. End the run: what the step has changed in its copies comes to the user's own
    #    objects. If the changes of the replicas do not fit together, the run raises an
    #    error and is undone.
    # A strategy with a plain `Storage` has nothing of this to do: it calls the step
    # with the user's own objects.
    def _run(
        self,
        fn: ReplicaFn,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        options: RunOptions,
    ) -> Tree:
        if self._workers.count > 1:
            return self._run_with_others(fn, args, kwargs, options)
        if not callable(fn):
            given_values.refuse_step(fn)
        if isinstance(self._storage, SharedObjects):
            return self._run_in_turns(self._storage, fn, args, kwargs, options)
        if not isinstance(self._storage, ReplicatedStorage):
            return self._run_alone(fn, args, kwargs, options)
        return self._run_together(fn, args, kwargs, options)

    def _run_with_others(
        self,
        fn: ReplicaFn,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        options: RunOptions,
    ) -> Tree:
        """A run in which other workers have replicas, too."""
        if self._is_running:
            raise RuntimeError(
                "strategy.run was called in a merge function, or on a second thread, "
                "during another run of the same strategy. Workers could not tell to "
                "which an exchange belongs: call run when the other has returned."
            )
        self._is_running, before = True, self._workers.num_exchanges
        self._workers.begin_run()
        try:  # as in a block of `exchanging`, which takes six calls
            if not callable(fn):
                given_values.refuse_step(fn)
            if isinstance(self._storage, OwnObjects):
                strategy, losses = self._container_strategy(), self._losses
                counts = self._counts(args, kwargs, options)
                return run_on_own_objects(
                    strategy, self._storage, fn, args, kwargs, options, losses, counts
                )
            return self._run_together(fn, args, kwargs, options)
        except BaseException as error:
            self._workers.tell_why(
                error, "the beginning of a run", self._workers.num_exchanges == before
            )
            raise
        finally:
            self._is_running = False

    def _refuse_run(self, error: Exception) -> None:
        if not self._is_running and not is_in_replica():
            self._workers.begin_run()  # as in the workers that do not refuse theirs
            self._workers.refuse(error, "the beginning of a run")

    def _exchanging(self, call: str) -> AbstractContextManager[None]:
        return (
            super()._exchanging(call)
            if self._workers.count == 1
            else self._workers.exchanging(call)
        )

    def _run_together(
        self,
        fn: ReplicaFn,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        options: RunOptions,
    ) -> Tree:
        strategy, storage, leaves = (
            self._container_strategy(),
            self._storage,
            tree_leaves((args, kwargs)),
        )
        assert isinstance(storage, ReplicatedStorage)
        check_component_counts(leaves, self._num_local)
        # The numbers below are the steps of Note [The story of a step].
        weights = self._weights(
            storage, leaves, options, self._counts(args, kwargs, options)
        )  # 1
        # What a settled step is, `RunLosses.settled` says. `_run/lone_replica.py` has
        # this line, too.
        is_settled = (
            options.gradient_reduction is None
            and getattr(fn, "__code__", None) in self._losses.settled
        )
        losses = (
            None if is_settled else self._losses.begin_run(fn, options, weights, leaves)
        )
        # See Note [Why a worker without rows runs the step] in `_group/participants`.
        uncounted = storage.as_before() if weights.is_understudy else _NO_BLOCK
        caching = (
            parametrizations_computed_anew()
            if are_parametrizations_cached()
            else _NO_BLOCK
        )
        streams = (
            DeviceStreams(self._accelerators, self._side_streams)
            if self._accelerators
            else None
        )
        # 2 and, when the block is left, 6.
        run = storage.begin_run(weights, fn, leaves, partial(Frame, strategy))
        telling = self._workers.arrive if self._workers.count > 1 else None
        with streams or _NO_BLOCK, run as run_state, uncounted, caching:

            def call(replica: Replica) -> Tree:
                replica.telling = telling
                given, own_fn, kept = (args, kwargs), fn, run_state.kept
                if weights.is_understudy:
                    given = distributed_values.select_for_understudy(given)
                if kept is not None:
                    own_fn, given = kept.bind(fn, replica.index), kept.select(given)
                own_args, own_kwargs = distributed_values.select(given, replica.index)
                group = ReplicaGroup(replica, weights, storage.devices, self._workers)
                context = running_context(strategy, group, run_state.published)
                with (
                    traced("run {} [replica {}]", fn, replica.index),
                    Frame(strategy, context, run_state.local_objects(replica)),
                    losses.watching(replica, run_state.replica_set.gradients)
                    if losses
                    else _NO_BLOCK,
                ):
                    try:
                        result = own_fn(*own_args, **own_kwargs)
                        refuse_unfinished(result)
                        run_state.replica_set.gradients.accumulate(replica.index)
                        return result
                    finally:
                        context._ends()

            results = self._replicas.run(
                call, weights.present, run_state.watch, streams
            )  # 3, and in it 4
            if self._streams is not None:
                self._workers.arrive("the end of strategy.run")
                self._streams.has_drawn |= self._replicas.has_drawn
                self._streams.has_drawn &= not weights.is_understudy
            result = self._regroup_results(results, weights, run_state)  # 5
        if streams is not None:
            self._side_streams = tuple(streams.side)
        run_state.warn()
        if losses is not None:
            losses.warn()
        return result

    def _run_in_turns(
        self,
        storage: SharedObjects,
        fn: ReplicaFn,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        options: RunOptions,
    ) -> Tree:
        strategy, leaves = self._container_strategy(), tree_leaves((args, kwargs))
        check_component_counts(leaves, self._num_local)
        # The numbers below are the steps of Note [The story of a step].
        weights = self._weights(
            storage, leaves, options, self._counts(args, kwargs, options)
        )  # 1
        is_settled = (
            options.gradient_reduction is None
            and getattr(fn, "__code__", None) in self._losses.settled
        )
        losses = (
            None if is_settled else self._losses.begin_run(fn, options, weights, leaves)
        )
        caching = (
            parametrizations_computed_anew()
            if are_parametrizations_cached()
            else _NO_BLOCK
        )
        streams = (
            DeviceStreams(self._accelerators, self._side_streams)
            if self._accelerators
            else None
        )
        leave_replicas = remember_frames()
        around = Surroundings(
            storage.devices,
            storage.parameter_device,
            self._workers,
            partial(Frame, strategy),
            storage.warned,
            storage.placement.averages_buffers,
        )
        with storage.running() as runs, streams or _NO_BLOCK, caching:
            known, reached = storage.known_of(fn, leaves)
            run = TurnsRun(known, reached, weights, around, leaves)  # 2
            runs.append(run)

            def call(replica: Replica) -> Tree:
                own_args, own_kwargs = distributed_values.select(
                    (args, kwargs), replica.index
                )
                group = ReplicaGroup(replica, weights, storage.devices, self._workers)
                context = running_context(strategy, group, run.acting)
                with (
                    traced("run {} [replica {}]", fn, replica.index),
                    Frame(strategy, context, takes_turns=True),
                    losses.watching(replica, run.gradients) if losses else _NO_BLOCK,
                ):
                    try:
                        step = partial(fn, *own_args, **own_kwargs)
                        result = run.call(replica, step)
                        refuse_unfinished(result)
                        return result
                    finally:
                        context._ends()

            try:
                # 3, and in it 4
                results = self._replicas.run(call, weights.present, run, streams)
                result = weights.regroup(results, self._workers, are_results=True)  # 5
                run.end()  # 6
            except BaseException:
                leave_replicas()
                run.abort()
                raise
            finally:
                run.let_go()
        if streams is not None:
            self._side_streams = tuple(streams.side)
        run.warn()
        if losses is not None:
            losses.warn()
        return result

    def _regroup_results(
        self, results: dict[int, Tree], weights: Participants, run_state: ReplicatedRun
    ) -> Tree:
        """What the replicas have returned, as one result.

        The program may call backward on it when the run is over.
        """
        if any(_may_require_grad(leaf) for leaf in tree_leaves(list(results.values()))):
            run_state.replica_set.gradients.deliver_late_ones()
        return weights.regroup(results, self._workers, are_results=True)

    def _counts(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], options: RunOptions
    ) -> Sequence[float] | None:
        """What a function of the user's says of the replicas of this worker.

        It is None if there is no such function.
        """
        count = self._examples if options.examples is None else options.examples
        if not callable(count):
            return None
        devices = [self._alone_on] if self._num_local == 1 else self._storage.devices
        return count_examples(
            self._container_strategy(),
            count,
            args,
            kwargs,
            devices,
            self._replicas.first,
        )

    def _weights(
        self,
        storage: ReplicatedStorage | SharedObjects,
        leaves: Sequence[Tree],
        options: RunOptions,
        counts: Sequence[float] | None,
    ) -> Participants:
        """How much each replica counts.

        Where there are several workers, they tell each other their rows.
        """
        n, default = self._num_local, self._gradient_reduction
        if self._streams is None:
            return Participants.of(leaves, n, options, default, counts=counts)
        refuse_other_rows = mention_reads(self._workers, leaves)
        self._streams.begin()
        weights = Participants.of(
            leaves, n, options, default, self._workers, storage.has_news, counts
        )
        refuse_other_rows()
        self._streams.settle()
        return weights

    def _run_alone(
        self,
        fn: ReplicaFn,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        options: RunOptions,
    ) -> Tree:
        """Calls the step in a single replica, which uses the user's own objects.

        This has to cost next to nothing.

        It runs between steps, when its code is in no cache of the processor: each
        function that it calls takes half a microsecond or more.
        """
        if options.examples is not None or self._examples is not None:
            # The only replica is the whole batch. But counts that do not fit are
            # refused, as where there are several.
            Participants.of(
                (),
                1,
                options,
                ReduceOp.MEAN,
                counts=self._counts(args, kwargs, options),
            )
        if args or kwargs:
            found = distributed_values.distributed_within((*args, *kwargs.values()))
            if found:
                check_component_counts(found, 1)
            if found or self._makes_containers:
                args, kwargs = (
                    distributed_values.select(args, 0),
                    distributed_values.select(kwargs, 0),
                )
        frame, frames = LoneFrame(self._container_strategy()), this_thread.frames
        depth, device = len(frames), self._alone_on
        # This is no `with` block: see Note [What happens on Ctrl-C] in
        # `_group/replica_threads`.
        try:
            frames.append(frame)
            if device is None or not needs_device_context(device):
                return call_step_alone(fn, args, kwargs)
            with using_device(device):
                return call_step_alone(fn, args, kwargs)
        finally:
            del frames[depth:]
            frame.ends()

    def _first_of(self, value: Tree) -> Tree:
        if self._workers.count == 1:
            return super()._first_of(value)
        (own, *_), matters = self._parts_of(value)
        told = (matters, own.cpu() if isinstance(own, torch.Tensor) else own)
        with self._exchanging("the assignment of a variable"):
            of_all = self._workers.all_gather_object(
                told, "the assignment of a variable"
            )
        return next((value for matters, value in of_all if matters), own)

    def _of_all_workers(
        self, put_together: Callable[..., torch.Tensor], value: Tree
    ) -> torch.Tensor:
        """One tensor of what all workers have of a value.

        `put_together` is `reduce_values` or `gather_values`.
        """
        with self._exchanging("strategy.reduce or strategy.gather"):
            check_component_counts([value], self._num_local)
            values, matter = self._parts_of(value)
            refuse_other_rows = mention_reads(self._workers, [value])
            total = put_together(
                values, self._storage.parameter_device, self._workers, matter
            )
            refuse_other_rows()
            return total

    def _parts_of(self, value: Tree) -> tuple[Sequence[Tree], bool]:
        """What this worker has of a value, and whether it counts.

        A plain value is the same in every replica.

        If no replica of this worker is present, it brings a value that only tells the
        shape and dtype.
        """
        if not isinstance(value, DistributedValues):
            return [value] * self._num_local, True
        return value.values or [getattr(value, "understudy", None)], bool(value.values)

    def _reduce_to(
        self,
        reduce_op: ReduceOp,
        value: Tree,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Tree:
        return self._batch_reduce_to(
            reduce_op, [(value, destinations)], options, "reduce_to"
        )[0]

    def _batch_reduce_to(
        self,
        op: ReduceOp,
        pairs: Sequence[Any],
        options: CommunicationOptions,
        method: str = "batch_reduce_to",
    ) -> list[Tree]:
        check_usable(
            method,
            options,
            lambda: [self._device_of(r) for r in range(self._num_replicas_in_sync)],
        )
        names, leaves, put_back = by_name([value for value, _ in pairs])
        self._agree_on_parts(lambda: names)
        reduced = zip(
            put_back(self._reduce_leaves(op, leaves, options)), pairs, strict=True
        )
        return [
            map_leaves(partial(given_values.send_to, destinations=where), value)
            for value, (_, where) in reduced
        ]

    def _reduce_leaf(self, op: ReduceOp, value: Tree) -> Tree:
        return self._reduce_leaves(op, [value], USUAL_OPTIONS)[0]

    def _agree_on_parts(self, paths: Callable[[], Sequence[str]]) -> None:
        if self._workers.count == 1:
            return
        own = list(paths())
        # A value of one part; a worker with several comes to another exchange.
        if own == [""]:
            return
        of_all = self._workers.all_gather_object(own, "the parts of a value")
        for w, theirs in enumerate(of_all):
            differing = sorted(set(theirs).symmetric_difference(of_all[0]))
            if theirs != of_all[0]:
                shown = f"value{differing[0]}" if differing else "some part twice"
                error = ValueError(
                    f"Workers 0 and {w} brought values of different structure: only "
                    f"one of them has {shown}. Each part is put together with that of "
                    "the same name, so every worker brings the same parts: a number "
                    "for each metric, also where there was nothing to measure. Rows "
                    "belong into one tensor, or into one list of Python objects."
                )
                self._workers.note_of_all(error)
                raise error

    def _reduce_nested(self, op: ReduceOp, value: Tree) -> Tree:
        leaves, spec = tree_flatten(value)
        are_several = self._workers.count == 1 and len(leaves) > 1
        if are_several and all(map(given_values.holds_tensors, leaves)):
            # The value that does not fit is named below.
            with suppress(TypeError, ValueError):
                return spec.unflatten(self._reduce_leaves(op, leaves, USUAL_OPTIONS))
        return super()._reduce_nested(op, value)

    def _reduce_leaves(
        self, op: ReduceOp, leaves: Sequence[Tree], options: CommunicationOptions
    ) -> list[Tree]:
        """The sum or mean of each of several leaves."""
        reduced = [self._without_sending(op, leaf) for leaf in leaves]
        check_component_counts(reduced, self._num_local)
        apart = [leaf for leaf in reduced if isinstance(leaf, DistributedValues)]
        if self._workers.count > 1:
            totals = [
                self._of_all_workers(partial(reduce_values, op, None), value)
                for value in apart
            ]
        else:
            # Outside of replicas a variable acts as one tensor. Its values for the
            # replicas are what is reduced.
            values = [
                value if isinstance(value, PerReplica) else PerReplica(value.values)
                for value in apart
            ]
            where = self._storage.parameter_device
            if len(values) == 1:
                totals = [self._ops.reduce(op, values[0], where, options)]
            else:
                totals = self._ops.batch_reduce(
                    op, [(value, where) for value in values], options
                )
            if op is ReduceOp.MEAN:
                for i, value in enumerate(values):
                    # The mean of integers is of torch's default dtype, also if one
                    # replica was present.
                    if len(value.values) == 1:
                        totals[i] = totals[i] / 1
        in_order = iter(totals)
        return [
            next(in_order) if isinstance(leaf, DistributedValues) else leaf
            for leaf in reduced
        ]

    def _without_sending(self, op: ReduceOp, value: Tree) -> Tree:
        """The sum or mean of a value that is known to be the same in all replicas.

        A distributed value that the replicas would have to send is returned as it is.
        """
        if isinstance(value, DistributedValues):
            is_equal = isinstance(value, (Mirrored, MirroredVariable))
            return value.values[0] if is_equal and op is ReduceOp.MEAN else value
        if op is ReduceOp.MEAN or (isinstance(value, (int, float)) and value == 0):
            return value
        if self._num_replicas_in_sync > 1:
            given_values.refuse_sum(value, self._num_replicas_in_sync)
        return as_tensor(value).clone()

    def _reduce_along_axis(
        self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]
    ) -> Tree:
        return self._of_all_workers(partial(reduce_values, op, axis), value)

    def _gather(self, value: Tree, axis: int) -> Tree:
        if not isinstance(value, DistributedValues):
            return (
                given_values.gather_alone(value, axis)
                if self._num_replicas_in_sync == 1
                else value
            )

        def put_together(
            values: Sequence[Tree], device: Device, workers: Workers, matter: bool
        ) -> torch.Tensor:
            return gather_values(as_axis(axis), values, device, workers, matter)

        return self._of_all_workers(put_together, value)

    def _gather_rows(self, value: Tree) -> list[Any]:
        if self._workers.count == 1 or (own_rows(value) is None and value):
            return super()._gather_rows(value)  # the same list in all workers
        refuse_other_rows = mention_reads(self._workers, [value])
        rows = list(chain.from_iterable(own_rows(value) or []))
        of_all = self._workers.all_gather_object(
            rows, "gather(axis=0) of Python objects"
        )
        refuse_other_rows()
        return list(chain.from_iterable(of_all))

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        return given_values.send_to(tensor, destinations)

    def _local_results(self, distributed_value: Tree) -> tuple[Tree, ...]:
        return distributed_values.local_results(distributed_value, self._num_local)

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        return distribute_dataset(
            dataset, self._storage.devices, options, self._workers
        )

    def _distribute_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions
    ) -> Any:
        return distribute_from_function(
            dataset_fn, self._storage.devices, options, self._workers
        )

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        self._storage.take_module(module)
        return move(module, memory_device(self._storage.parameter_device))

    def _distribute_optimizer(self, optimizer: Optimizer) -> None:
        self._storage.take_stepper(optimizer)

    @contextmanager
    def _creation_scope(self) -> Iterator[None]:
        with using_device(self._storage.parameter_device), self._storage.watching():
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._workers.count > 1:
            raise TypeError(
                "A strategy of several processes cannot be copied: its exchanges would "
                "have no order."
            )
        return type(self)(
            type(self._storage)(self._storage.placement),
            self._losses.said,
            self._ops,
            self._examples,
        )


_NO_BLOCK: AbstractContextManager[None] = nullcontext()


def _may_require_grad(value: Tree) -> bool:
    """Whether a backward may begin at a leaf of a result.

    The answer is yes for an object of the user's own, since it may hold tensors.
    """
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return not isinstance(value, _WITHOUT_TENSORS) and torch.is_grad_enabled()


_WITHOUT_TENSORS = (*PLAIN, torch.Size)
