"""Where programs run in replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torchstrategy

_KINDS: dict[str, Callable[[list[str], str], torchstrategy.Strategy]] = {
    "central": lambda devices, owner: torchstrategy.CentralStorageStrategy(
        devices, owner
    ),
    "mirrored": lambda devices, owner: torchstrategy.MirroredStrategy(devices),
    "mirrored, hierarchical": lambda devices, owner: torchstrategy.MirroredStrategy(
        devices, torchstrategy.HierarchicalCopyAllReduce()
    ),
    "mirrored, to one device": lambda devices, owner: torchstrategy.MirroredStrategy(
        devices, torchstrategy.ReductionToOneDevice()
    ),
    "one device": lambda devices, owner: torchstrategy.OneDeviceStrategy(devices[0]),
}
STRATEGIES = list(_KINDS)
DATA_PARALLEL = "data parallel"
WORKERS = "workers"  # in several processes, each of which runs the program
_KINDS[WORKERS] = lambda devices, owner: torchstrategy.MultiWorkerMirroredStrategy(
    devices=devices
)


@dataclass(frozen=True)
class Topology:
    """A strategy, or DataParallel, and its devices.

    `owner`: where CentralStorageStrategy keeps parameters.
    """

    kind: str = "central"
    devices: tuple[str, ...] = ("cpu", "cpu")
    owner: str | None = None

    @property
    def is_data_parallel(self) -> bool:
        """Whether there is no strategy."""
        return self.kind == DATA_PARALLEL

    def strategy(self) -> torchstrategy.Strategy:
        """A new one."""
        owner = self.owner or self.devices[0]
        return _KINDS[self.kind](list(self.devices), owner)
