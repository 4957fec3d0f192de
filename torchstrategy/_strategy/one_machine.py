"""What the strategies on one machine have in common: values go to their destinations, and a lone replica runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from torchstrategy._communication.cross_device_ops import devices_of
from torchstrategy._communication.options import CommunicationOptions, check_usable
from torchstrategy._communication.reductions import check_gatherable
from torchstrategy._communication.transfer import sent_to
from torchstrategy._core.context import frames_of_this_thread
from torchstrategy._core.devices import in_use, needs_device_context
from torchstrategy._core.distributed_values import (
    ABSENT,
    DistributedValues,
    Mirrored,
    check_component_counts,
    distributed_within,
    local_results,
    select,
)
from torchstrategy._core.options import ReduceOp, RunOptions
from torchstrategy._core.tree import map_leaves, tree_flatten
from torchstrategy._core.types import Device, ReplicaFn, StrategyLike, Tree
from torchstrategy._execution.instruments import performed_alone
from torchstrategy._replication.storage import Storage
from torchstrategy._strategy.replica_context import LoneFrame
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._training.replica_weights import ReplicaWeights


class OneMachineExtended(StrategyExtended):
    """What a single replica and several replicas on one machine have in common."""

    def _local_results(self, distributed_value: Tree) -> tuple[Tree, ...]:
        return local_results(distributed_value, self._num_replicas_in_sync)

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


def run_alone(
    strategy: StrategyLike,
    device: Device | None,
    fn: ReplicaFn,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    options: RunOptions,
    own_containers: bool = False,
) -> Tree:
    """Calls the step in a lone replica on the user's own objects, which a step should not notice.

    It is called between steps, when no cache holds it: each function that it calls takes half a microsecond or more.
    """
    if options.examples is not None:
        ReplicaWeights.of((), 1, options, ReduceOp.MEAN)  # refuses counts that do not fit
    if args or kwargs:
        distributed = distributed_within((*args, *kwargs.values()))
        if distributed:
            check_component_counts(distributed, 1)
        if distributed or own_containers:
            args, kwargs = select(args, 0), select(kwargs, 0)
    frame, frames = LoneFrame(strategy), frames_of_this_thread()
    depth = len(frames)
    try:  # not a block: a signal's handler may raise on the way into its `__exit__`, and the frame would stay
        frames.append(frame)
        if device is None or not needs_device_context(device):
            return performed_alone(fn, args, kwargs)
        with in_use(device):
            return performed_alone(fn, args, kwargs)
    finally:
        del frames[depth:]
        frame.ends()


def gathered_alone(value: Tree, axis: int) -> Tree:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        check_gatherable([value], axis)  # code that is written with one device should not break on two
    return value


def _sent(value: Tree, destinations: Any) -> Tree:
    """A value at its destinations: a tensor on a device, or a copy for each component of a distributed value."""
    devices = devices_of(destinations)
    if not isinstance(destinations, DistributedValues):
        return value.to(devices[0]) if isinstance(value, torch.Tensor) else value
    copies = (sent_to([value], [device])[0][0] for device in devices)
    return Mirrored([ABSENT if component is ABSENT else next(copies) for component in destinations._components])


def require_variable(v: object) -> None:
    if not isinstance(v, (nn.Module, torch.Tensor)):
        raise TypeError(f"variable_created_in_scope asks about a module or a parameter; got a {type(v).__name__}.")


@contextmanager
def creating_in(storage: Storage) -> Any:
    with in_use(storage.parameter_device), storage.watching():
        yield
