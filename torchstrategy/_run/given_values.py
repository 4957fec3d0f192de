"""Values that replicas get or make: where they are sent, and what they hold."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchstrategy._base.distributed_values import DistributedValues, PerReplica
from torchstrategy._base.types import Tree
from torchstrategy._group.reductions import check_gatherable
from torchstrategy._parity.cross_device_ops import deliver, devices_of


def refuse_step(fn: object) -> NoReturn:
    """Raises the error for a step that is no function."""
    raise TypeError(
        f"Strategy.run calls its first argument in each replica; {fn!r} cannot be "
        "called."
    )


def refuse_sum(value: object, num_replicas: int) -> NoReturn:
    """Raises the error for a plain value that is to be summed over replicas."""
    raise ValueError(
        f"A value that is not distributed, {value!r}, cannot be summed over "
        f"{num_replicas} replicas: it is not known whether each of them has it. Return "
        "it from strategy.run, or multiply it."
    )


def holds_tensors(value: Tree) -> bool:
    """Whether a value has a tensor for each replica."""
    return type(value) is PerReplica and all(
        isinstance(component, torch.Tensor) for component in value.values
    )


def gather_alone(value: Tree, axis: int) -> Tree:
    """What a single replica gathers: its own value."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        # Code that is written with one device should not break on two.
        check_gatherable([value], axis)
    return value


def send_to(value: Tree, destinations: Any) -> Tree:
    """A value at its destinations.

    For one device, this is a tensor there. For a distributed value, each component gets
    a copy.
    """
    if not isinstance(value, torch.Tensor):
        devices_of(destinations)  # raises an error for what is none
        return value
    # The copies are the caller's, who may write on them.
    return deliver(
        value.clone() if isinstance(destinations, DistributedValues) else value,
        destinations,
    )
