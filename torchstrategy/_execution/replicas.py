"""Where the replicas of a strategy run: a lone one on the caller's thread, several on the threads of a team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import performed_alone
from torchstrategy._execution.replica import InlineReplica, Replica, Watch
from torchstrategy._execution.replica_threads import ReplicaThreads


@final
class Replicas:
    """The replicas of a strategy: where each of them runs.

    A run borrows a team, so runs at the same time, of several threads or from a merge function, do not wait for each
    other.

    Args:
        devices: The device of each replica.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._idle: list[ReplicaThreads] = []

    def run(
        self, call: Callable[[Replica], Tree], present: Sequence[int], watch: Watch | None = None
    ) -> dict[int, Tree]:
        """Calls `call` for each of the replicas `present`, and returns what each returned; see `ReplicaThreads.run`."""
        if len(self.devices) == 1:
            replica = InlineReplica(0, self.devices[0], torch.get_default_device())
            return {0: performed_alone(call, (replica,), {})}
        threads = self._borrow()
        try:
            return threads.run(call, present, watch)
        finally:
            if threads.is_fit:
                self._idle.append(threads)

    def _borrow(self) -> ReplicaThreads:
        while self._idle:
            threads = self._idle.pop()
            if threads.is_fit:
                return threads
        return ReplicaThreads(self.devices)
