"""Gradients that a replica has read as complete, and to which other replicas still had to add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from torchstrategy._training.replica_gradients import Reads, ReplicaGradients, read_too_early


@final
class EarlyReads(NamedTuple):
    """Positions of parameters whose gradients were read too early if another worker has a gradient to add.

    Args:
        doubtful: A replica without a gradient of it may have read it after a backward.
        idle: A replica that ran no backward has read it.
        unread: A replica that has a gradient of it has not read it. Together with `idle`, the read was too early.
    """

    doubtful: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()

    @classmethod
    def of(cls, of_replicas: Sequence[ReplicaGradients], reads: Sequence[Reads]) -> EarlyReads:
        """What the replicas of one worker tell the others."""
        local = [of_replica.local_indices() for of_replica in of_replicas]
        doubtful = (read.doubtful - own for own, read in zip(local, reads, strict=True))
        idle = (read.all for own, read in zip(local, reads, strict=True) if not own)
        unread = (own - read.all for own, read in zip(local, reads, strict=True))
        return cls(*(frozenset[int]().union(*sets) for sets in (doubtful, idle, unread)))


def refuse_early_reads(of_replicas: Sequence[ReplicaGradients], reads: Sequence[Reads], names: Sequence[str]) -> None:
    """Refuses to reduce if a replica has read, as complete, a gradient to which others still had to add.

    Args:
        of_replicas: The gradients of the replicas that are present.
        reads: What each of them has read.
        names: What to call the parameters in a message.

    Raises:
        RuntimeError: Naming the parameter and the replicas.
    """
    if not any(read.all for read in reads):
        return
    local = [of_replica.local_indices() for of_replica in of_replicas]
    for r, read in enumerate(reads):
        for other, others in enumerate(reads):
            missed = local[other] & read.doubtful - local[r]
            # Replica `r` ran no backward. The other one did, read a gradient after it, and so came here. If `r` has
            # read the same gradient without coming here, it took for complete what the other one adds to now.
            if not local[r]:
                missed |= local[other] & read.all - others.all
            if missed:
                ids = [one.replica.index for one in (of_replicas[r], of_replicas[other]) if one.replica is not None]
                raise RuntimeError(read_too_early(names[min(missed)], *ids))
