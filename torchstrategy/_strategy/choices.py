"""What a user chooses when a strategy is made, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchstrategy._core.devices import canonical_device, local_accelerators
from torchstrategy._core.types import Device, DeviceLike


def devices_of_replicas(name: str, devices: Sequence[DeviceLike] | None) -> list[Device]:
    """The device of each replica; for None all accelerators of this machine, or a CPU. `name` is that of the argument.

    Raises:
        ValueError: If there is none, or one is not there.
        TypeError: If a device, or the list of them, is of the wrong kind.
    """
    if devices is None:
        return local_accelerators() or [canonical_device("cpu:0")]
    if isinstance(devices, str):
        raise ValueError(f"{name} is a list of devices, one for each replica: write [{devices!r}].")
    if not isinstance(devices, Iterable) or isinstance(devices, (bytes, dict, set, frozenset)):
        raise TypeError(f"{name} is a list of devices, one for each replica; got {devices!r}.")
    found = [canonical_device(device) for device in devices]
    if not found:
        raise ValueError(f"{name}=[] names no device to run on. Leave it out for all devices of this machine.")
    return found


def averages(aggregation: str) -> bool:
    """Whether running statistics become the mean of the replicas'."""
    if aggregation not in ("mean", "only_first_replica"):
        raise ValueError(f"buffer_aggregation={aggregation!r} is neither 'mean' nor 'only_first_replica'.")
    return aggregation == "mean"
