"""Values that replicas are given, or have made: where they are sent, and what they hold."""

from __future__ import annotations

from typing import Any

import torch

from torchstrategy._communication.cross_device_ops import delivered, devices_of
from torchstrategy._communication.reductions import check_gatherable
from torchstrategy._core.distributed_values import DistributedValues, PerReplica
from torchstrategy._core.types import Tree


def holds_tensors(value: Tree) -> bool:
    """Whether a value has a tensor for each replica."""
    return type(value) is PerReplica and all(isinstance(component, torch.Tensor) for component in value.values)


def gathered_alone(value: Tree, axis: int) -> Tree:
    """What a single replica gathers: its own value."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        check_gatherable([value], axis)  # code that is written with one device should not break on two
    return value


def sent(value: Tree, destinations: Any) -> Tree:
    """A value at its destinations: a tensor on a device, or a copy for each component of a distributed value."""
    if not isinstance(value, torch.Tensor):
        devices_of(destinations)  # raises an error for what is none
        return value
    # The copies are the caller's, who may write on them.
    return delivered(value.clone() if isinstance(destinations, DistributedValues) else value, destinations)
