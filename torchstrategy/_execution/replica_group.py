"""The replicas of one run, as one of them sees the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import final

import torch

from torchstrategy._core.context import current_replica_context
from torchstrategy._core.distributed_values import ABSENT, regroup
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.collectives import Collective
from torchstrategy._execution.replica import InlineReplica, Replica


@final
class ReplicaGroup:
    """Lets a replica synchronize with the others. The strategy makes one for each replica and each call of the step.

    Args:
        replica: This replica.
        present: The replicas of the run, in order.
        weights: The weight of the gradient of each replica of the strategy.
        devices: The device of each replica of the strategy. None: the device of the tensors that it brings.
        published: A block in which a merge function runs: there, the parameters of the user's own model have the
            gradients.
    """

    def __init__(
        self,
        replica: Replica,
        present: Sequence[int],
        weights: Sequence[float],
        devices: Sequence[Device | None],
        published: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.replica = replica
        self.present = tuple(present)
        self.published = published
        self._weights = weights
        self._devices = devices

    @cached_property
    def collective(self) -> Collective:
        """The collective operations of the replica with the others. Few steps ask for them."""
        return Collective(self.replica, self.present, self._weights, self._devices)

    def regroup(self, brought: Sequence[Tree]) -> Tree:
        """One tree of the trees that the replicas of this run brought."""
        # Replicas that take no part in this run count, too, since a distributed value has a component for each replica
        # of the strategy.
        by_replica: list[Tree] = [ABSENT] * len(self._devices)
        for r, tree in zip(self.present, brought, strict=True):
            by_replica[r] = tree
        return regroup(by_replica)


def _alone() -> ReplicaGroup:
    """The group of a single replica that uses the user's own objects. It has no state, so one serves all of them."""
    replica = InlineReplica(0, torch.device("cpu", 0))  # nobody asks a single replica for its device
    return ReplicaGroup(replica, (0,), (1.0,), (None,), nullcontext)


ALONE = _alone()


def group_here(what: str) -> ReplicaGroup | None:
    """The group of the replica that the caller is in, for a call of `what`; None in the cross-replica context.

    Raises:
        RuntimeError: If the replica cannot synchronize with others: it was entered by hand, or has ended.
    """
    context = current_replica_context()
    if context is None:
        return None
    group = context._require_active(what)
    assert isinstance(group, ReplicaGroup)
    return group
