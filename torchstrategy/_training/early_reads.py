"""Gradients that a replica has read as complete, and to which other replicas still had to add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from torchstrategy._training.replica_gradients import Reads, ReplicaGradients


@final
class EarlyReads(NamedTuple):
    """Positions of parameters whose gradients were read too early if somebody has a gradient to add.

    Args:
        doubtful: A replica without a gradient of it may have read it after a backward.
        idle: A replica that ran no backward has read it.
        unread: A replica that has a gradient of it has not read it. Together with `idle`, the read was too early: that
            replica ran a backward, read a gradient after it, and so came to the reduction. The idle one has read the
            same gradient without coming there, so it took for complete what the other one adds to now.
    """

    doubtful: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()

    @classmethod
    def of(cls, of_replicas: Sequence[ReplicaGradients], reads: Sequence[Reads], names: Sequence[str]) -> EarlyReads:
        """What the replicas of one worker tell the others.

        Args:
            of_replicas: The gradients of the replicas that are present.
            reads: What each of them has read.
            names: What to call the parameters in a message.

        Raises:
            RuntimeError: If one replica of this worker has read what another one still had to add to. The parameter
                and the replicas are named.
        """
        local = [of_replica.local_indices() for of_replica in of_replicas]
        pairs = list(zip(local, reads, strict=True))
        doubtful = frozenset[int]().union(*(read.doubtful - own for own, read in pairs))
        idle = frozenset[int]().union(*(read.all for own, read in pairs if not own))
        unread = frozenset[int]().union(*(own - read.all for own, read in pairs))
        if missed := set().union(*local) & (doubtful | (idle & unread)):
            index, ids = min(missed), [one.replica.index for one in of_replicas if one.replica is not None]
            too_early = [(read.doubtful - own) | (frozenset() if own else read.all & unread) for own, read in pairs]
            reader = next(r for r, indices in zip(ids, too_early, strict=True) if index in indices)
            adder = next(r for r, own in zip(ids, local, strict=True) if index in own)
            raise RuntimeError(_TOO_EARLY.format(reader=reader, name=names[index], adder=adder))
        return cls(doubtful, idle, unread)


_TOO_EARLY = (
    "Replica {reader} read the gradient of {name} to which replica {adder} still had to add. This happens if a replica "
    "that did not use the parameter ran no backward, or if backward ran twice in it without a new forward and without "
    "a read of all gradients in between. Run backward in every replica; where there is no loss, call "
    "(outputs.sum() * 0).backward(). Or read gradients after strategy.run."
)
