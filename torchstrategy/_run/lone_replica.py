"""A run in the only replica of one of several workers, on the user's objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from torchstrategy._base import distributed_values
from torchstrategy._base.context import needs_device_context, this_thread, using_device
from torchstrategy._base.distributed_values import check_component_counts
from torchstrategy._base.options import RunOptions
from torchstrategy._base.torch_internals import is_profiling
from torchstrategy._base.trace import traced
from torchstrategy._base.types import Device, ReplicaFn, StrategyLike, Tree
from torchstrategy._group.group import InlineReplica, ReplicaGroup
from torchstrategy._group.instruments import call_step_alone
from torchstrategy._group.participants import Participants
from torchstrategy._run.own.own_objects import OwnObjects
from torchstrategy._run.run_losses import RunLosses
from torchstrategy.replica_context import LoneFrame, refuse_unfinished


def run_on_own_objects(
    strategy: StrategyLike,
    storage: OwnObjects,
    fn: ReplicaFn,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    options: RunOptions,
    losses: RunLosses,
    counts: Sequence[float] | None = None,
) -> Tree:
    """Calls the step once, in this worker's replica.

    It is one function of many lines, since it runs between steps, when its code is in
    no cache of the processor: each call takes several times as long as in a loop.

    Args:
        strategy: The strategy.
        storage: What the step uses.
        fn: The step.
        args: Its positional arguments, with the values of all replicas.
        kwargs: Its keyword arguments.
        options: What the user has said about the run.
        losses: What the strategy does about the losses of its steps.
        counts: How much this replica counts, as a function of the user's has said.
    """
    workers = storage.placement.workers
    values = distributed_values.distributed_within((*args, *kwargs.values()))
    check_component_counts(values, 1)
    weights = Participants.of_lone_replicas(
        values, options, losses.reduction, workers, counts
    )
    device = storage.devices[0]
    # Where the step has the caller's default device, nobody needs to ask for it, which
    # takes long.
    callers_device = (
        torch.get_default_device() if needs_device_context(device) else None
    )

    if weights.is_understudy:
        args, kwargs = distributed_values.select_for_understudy((args, kwargs))
    args, kwargs = (
        distributed_values.select(args, 0),
        distributed_values.select(kwargs, 0) if kwargs else kwargs,
    )
    name = getattr(fn, "__name__", type(fn).__name__)
    make_group = partial(_make_group, storage, weights, callers_device)
    frame, frames = LoneFrame(strategy, make_group), this_thread.frames

    def call() -> Tree:
        depth = len(frames)
        # This is no `with` block: a signal's handler may raise on the way into
        # `__exit__`, and the frame would stay.
        try:
            frames.append(frame)
            workers.begin_step()
            if callers_device is None:
                result = call_step_alone(fn, args, kwargs)
            else:
                with using_device(device):
                    result = call_step_alone(fn, args, kwargs)
            if result is not None:
                refuse_unfinished(result)
        finally:
            del frames[depth:]
            frame.ends()
        return result

    # What a settled step is, `RunLosses.settled` says. `replicated.py` has this line,
    # too: a function for it would be a call more in each run.
    is_settled = (
        options.gradient_reduction is None
        and getattr(fn, "__code__", None) in losses.settled
    )
    watching = (
        None
        if is_settled
        else losses.begin_lone_run(fn, options, weights, storage, name)
    )
    watched = call if watching is None else partial(watching.watched, call)
    if is_profiling():
        with traced("run {} [replica {}]", fn, 0):
            result = storage.run(weights, name, values, (args, kwargs), watched)
    else:
        result = storage.run(weights, name, values, (args, kwargs), watched)
    if watching is not None:
        watching.warn()
    return (
        None
        if result is None
        else weights.regroup({0: result}, workers, are_results=True)
    )


def _make_group(
    storage: OwnObjects, weights: Participants, callers_device: Device | None
) -> ReplicaGroup:
    """The replica, as it synchronizes with those of other workers."""
    replica = InlineReplica(0, storage.devices[0], callers_device)
    replica.telling = storage.placement.workers.arrive
    replica.combining = storage.random.for_all_workers
    return ReplicaGroup(replica, weights, storage.devices, storage.placement.workers)
