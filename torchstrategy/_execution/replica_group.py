"""The replicas that run one step together, as one of them sees the others."""

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
    """How a replica that runs meets the others. Made by the strategy, for one call of the step."""

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
        self.published = published  # for the length of a merge function, the owner's gradients are up to date
        self._num_replicas = num_replicas

    def regroup(self, brought: Sequence[Tree]) -> Tree:
        by_replica: list[Tree] = [ABSENT] * self._num_replicas
        for r, tree in zip(self.present, brought, strict=True):
            by_replica[r] = tree
        return regroup(by_replica)


def _alone() -> ReplicaGroup:
    """How a lone replica on the user's own objects meets itself. It holds nothing, so that one serves all."""
    replica = InlineReplica(0, torch.device("cpu", 0))  # only those of several replicas are asked where they are
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
