"""The replicas of one run, as one of them sees the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch

from torchstrategy._core.context import current_replica_context
from torchstrategy._core.distributed_values import ABSENT, regroup
from torchstrategy._core.types import Tree
from torchstrategy._execution.collectives import Collective
from torchstrategy._execution.replica import InlineReplica, Replica


@final
class ReplicaGroup:
    """Lets a replica synchronize with the others. The strategy makes one for each replica and each call of the step."""

    def __init__(
        self,
        replica: Replica,
        collective: Collective,
        present: Sequence[int],
        num_replicas: int,
        published: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.replica = replica
        self.collective = collective
        self.present = tuple(present)
        # A merge function runs in this block: there, the parameters of the user's own model have the gradients.
        self.published = published
        self._num_replicas = num_replicas

    def regroup(self, brought: Sequence[Tree]) -> Tree:
        """One tree of the trees that the replicas of this run brought."""
        # Replicas that take no part in this run count, too, since a distributed value has a component for each replica
        # of the strategy.
        by_replica: list[Tree] = [ABSENT] * self._num_replicas
        for r, tree in zip(self.present, brought, strict=True):
            by_replica[r] = tree
        return regroup(by_replica)


def _alone() -> ReplicaGroup:
    """The group of a single replica that uses the user's own objects. It has no state, so one serves all of them."""
    replica = InlineReplica(0, torch.device("cpu", 0))  # nobody asks a single replica for its device
    return ReplicaGroup(replica, Collective(replica, (0,), (1.0,), (None,)), (0,), 1, nullcontext)


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
