"""Reads data that other workers do not have, in step with their reading of theirs."""

from __future__ import annotations

from typing import final

import torch

from torchstrategy._communication.workers import Workers
from torchstrategy._core.distributed_values import ABSENT, PerReplica
from torchstrategy._core.tree import map_leaves
from torchstrategy._core.types import Device, Tree
from torchstrategy._input.batch_types import moved
from torchstrategy._input.reading import Reading


@final
class InStep(Reading):
    """One epoch in which each worker reads a dataset of its own, and which ends where the last of them ends.

    A worker whose data has run out before that of others gets its last batch again, as that of an understudy: it takes
    part in the steps, and its rows do not count. If there was none, it gets a batch of another worker.

    Args:
        reading: Reads this worker's own dataset.
        workers: The processes that train together.
        device: Where a batch of another worker is used. None: in host memory.
    """

    def __init__(self, reading: Reading, workers: Workers, device: Device | None) -> None:
        self._reading = reading
        self._workers = workers
        self._device = device or torch.device("cpu")
        self._last: list[Tree] = []  # the last batch, once there was one

    def next(self) -> Tree:
        try:
            self._last, has = [self._reading.next()], True
        except StopIteration:
            has = False
        of_all = self._workers.all_gather_object((has, bool(self._last)), "the next batch of a dataset")
        if not any(others_have for others_have, _ in of_all):
            self.close()
            raise StopIteration
        if not all(had for _, had in of_all):
            lender = next(w for w, (others_have, _) in enumerate(of_all) if others_have)
            mine = _copied(self._last[0], torch.device("cpu")) if self._workers.index == lender else None
            lent = self._workers.all_gather_object(mine, "the first batch of a dataset")[lender]
            self._last = self._last or [_copied(lent, self._device)]
        return self._last[0] if has else map_leaves(_unseen, self._last[0])

    def close(self) -> None:
        self._reading.close()
        self._last.clear()


def _copied(batch: Tree, device: Device) -> Tree:
    """A batch that can be pickled, in which all replicas have what the first one had, on `device`."""

    def copied(leaf: Tree) -> Tree:
        if not isinstance(leaf, PerReplica):
            return leaf
        return PerReplica([moved(leaf.values[0], device)] * len(leaf._components), is_kept=True)

    return map_leaves(copied, batch)


def _unseen(leaf: Tree) -> Tree:
    if not isinstance(leaf, PerReplica):
        return leaf
    count = len(leaf._components)
    return PerReplica([ABSENT] * count, (0,) * count, understudy=leaf._in_replica(0))
