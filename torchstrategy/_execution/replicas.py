"""Where replicas run: one on the caller's thread, several on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from torchstrategy._core.devices import in_use
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import performed_alone
from torchstrategy._execution.replica import InlineReplica, Replica, Watch
from torchstrategy._execution.replica_threads import ReplicaThreads


@final
class Replicas:
    """Runs the replicas of a strategy: one on the caller's thread, several on threads.

    Each run borrows a set of threads. So several runs at the same time, of several threads or from a merge function, do
    not wait for each other.

    Args:
        devices: The device of each replica.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._idle: list[ReplicaThreads] = []

    def run(
        self, call: Callable[[Replica], Tree], present: Sequence[int], watch: Watch | None = None
    ) -> dict[int, Tree]:
        """Calls `call` for each of the replicas `present`, and returns their results; see `ReplicaThreads.run`."""
        # A single replica has nobody to take turns with, so it runs as a plain step would: on the caller's thread.
        if len(self.devices) == 1:
            replica = InlineReplica(0, self.devices[0], torch.get_default_device())
            with in_use(replica.device):
                return {0: performed_alone(call, (replica,), {})}
        threads = self._borrow()
        try:
            return threads.run(call, present, watch)
        finally:
            # After an interrupted run the threads have ended, and cannot be used again.
            if threads.is_fit:
                self._idle.append(threads)

    def _borrow(self) -> ReplicaThreads:
        while self._idle:
            threads = self._idle.pop()
            if threads.is_fit:
                return threads
        return ReplicaThreads(self.devices)
