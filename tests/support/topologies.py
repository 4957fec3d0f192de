"""The strategies for tests: every kind, on the one CPU or on simulated devices."""

from __future__ import annotations

from collections.abc import Callable

import torch

import torchstrategy
from torchstrategy._base.devices import canonical_device
from torchstrategy._base.options import ReduceOp
from torchstrategy._run.placement import Placement
from torchstrategy._turns.switch import storage_of_several
from torchstrategy.replicated import ReplicatedExtended
from torchstrategy.testing import simulated_devices

# Where the strategies of these tests run: on the one CPU, or each replica on a
# simulated device of its own.
SIMULATED = simulated_devices()


def compute_devices(replicas: int) -> list[torch.device]:
    """The device of each of so many replicas.

    Simulated are five; the last of them computes nothing.
    """
    return [
        SIMULATED[r % 4] if SIMULATED else torch.device("cpu") for r in range(replicas)
    ]


def central(replicas: int, **kwargs: object) -> torchstrategy.Strategy:
    """CentralStorageStrategy whose parameters are where replica 0 is.

    Replicas there share the owner's memory.
    """
    devices = compute_devices(replicas)
    return torchstrategy.CentralStorageStrategy(devices, devices[0], **kwargs)  # type: ignore[arg-type]


def central_in_one_place(replicas: int) -> torchstrategy.Strategy:
    """The same with all replicas on one device, so that they run one by one."""
    device = SIMULATED[1] if SIMULATED else "cpu"
    return torchstrategy.CentralStorageStrategy([device] * replicas, device)


def central_with_copies(replicas: int) -> torchstrategy.Strategy:
    """The same, but each replica's parameters are real copies of another device's.

    Or they are as if they were on another device.
    """
    devices = [canonical_device(device) for device in compute_devices(replicas)]
    owner = SIMULATED[4] if SIMULATED else devices[0]
    storage = storage_of_several(Placement(devices, owner, may_alias=False))
    return torchstrategy.Strategy(ReplicatedExtended(storage, ReduceOp.MEAN))


def mirrored(replicas: int) -> torchstrategy.Strategy:
    """Mirrored: every device has parameters of its own and updates them."""
    return torchstrategy.MirroredStrategy(compute_devices(replicas))


def mirrored_with_copies(replicas: int) -> torchstrategy.Strategy:
    """The same, but on one device, too, each replica has parameters of its own.

    It is as if it had a device of its own.
    """
    devices = [canonical_device(device) for device in compute_devices(replicas)]
    storage = storage_of_several(
        Placement(devices, devices[0], may_alias=False, is_mirrored=True)
    )
    return torchstrategy.Strategy(ReplicatedExtended(storage, ReduceOp.MEAN))


TOPOLOGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "default": torchstrategy.get_strategy,
    "one_device": lambda: torchstrategy.OneDeviceStrategy(
        SIMULATED[1] if SIMULATED else "cpu"
    ),
    "central_1": lambda: central(1),
    "central_2": lambda: central(2),
    "central_3": lambda: central(3),
    "central_4": lambda: central(4),
    "central_offset": lambda: torchstrategy.CentralStorageStrategy(
        ["cpu:1", "cpu:2"], "cpu:3"
    ),
    "mirrored_2": lambda: mirrored(2),
    "mirrored_4": lambda: mirrored_with_copies(4),
    "copies_1": lambda: central_with_copies(1),
    "copies_3": lambda: central_with_copies(3),
}
# Under these every test runs; two more say little that others do not: in one process
# copies are like those of mirrored replicas, and where devices are simulated logical
# CPUs are like one.
EVERY = [
    name
    for name in TOPOLOGIES
    if name not in ("central_2", "central_offset" if SIMULATED else "copies_3")
]
SEVERAL = [
    name
    for name in EVERY
    if name not in ("default", "one_device", "central_1", "copies_1")
]
ALONE = [name for name in EVERY if name not in SEVERAL]

# What makes so many replicas: with memory of their own, and, where nothing is sent,
# with that of the owner.
MAKERS: dict[str, Callable[[int], torchstrategy.Strategy]] = {
    **({"copies": central_with_copies} if SIMULATED else {"aliased": central}),
    "mirrored": mirrored,
}
