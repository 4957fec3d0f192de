"""The devices of values and of destinations, and the copies that bring values to destinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from torchstrategy._core.devices import canonical_device, memory_device
from torchstrategy._core.distributed_values import ABSENT, DistributedValues, Mirrored
from torchstrategy._core.types import Device, Tree

Destinations: TypeAlias = "str | Device | torch.Tensor | DistributedValues"
"""A device, a tensor on the device that is meant, or a distributed value: the device of each of its components."""


def check_destinations(destinations: object) -> None:
    """Raises an error for destinations that do not say a device.

    Raises:
        ValueError: If it is nothing that is on a device, and names none.
    """
    if not isinstance(destinations, (str, torch.device, torch.Tensor, DistributedValues)) or (
        isinstance(destinations, str) and not destinations
    ):
        raise ValueError(
            "destinations says where the result goes: a device such as 'cuda:0', a tensor, whose device is meant, or a "
            f"distributed value, for a copy on the device of each component; got {destinations!r}."
        )
    devices_of(destinations)


def devices_of(where: Destinations) -> list[Device]:
    """The devices of destinations, as tensors report them.

    Raises:
        ValueError: If there is no such device, or a component is on none.
    """
    if isinstance(where, DistributedValues):
        return [_device_of_component(component) for component in where.values]
    return [where.device if isinstance(where, torch.Tensor) else memory_device(canonical_device(where))]


def delivered(value: torch.Tensor, destinations: Destinations) -> Tree:
    """`value` on its destinations: a tensor, or a mirrored value if there are several. It may return `value` itself."""
    return as_meant(copied_to(value, devices_of(destinations)), destinations)


def copied_to(value: torch.Tensor, devices: Sequence[Device]) -> list[torch.Tensor]:
    """`value` on each of several devices; on the first, `value` itself if it is there. Nobody else may write on it."""
    return [value.to(device, copy=i > 0) for i, device in enumerate(devices)]


def as_meant(copies: list[torch.Tensor], destinations: Destinations) -> Tree:
    """Equal tensors, one on each device of the destinations, as one value."""
    if not isinstance(destinations, DistributedValues) or len(destinations._components) == 1:
        return copies[0]
    there = iter(copies)
    return Mirrored([ABSENT if component is ABSENT else next(there) for component in destinations._components])


def _device_of_component(component: Tree) -> Device:
    if not isinstance(component, torch.Tensor):
        raise ValueError(f"destinations has a component {component!r}, which is on no device: it must be a tensor.")
    return component.device
