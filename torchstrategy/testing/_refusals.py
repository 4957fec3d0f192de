"""What the tools that watch and disturb runs refuse, in one voice."""

from __future__ import annotations

from torchstrategy._base.context import current_frame
from torchstrategy._base.errors import an, plural


def refuse_bad_replica(what: str, replica: object) -> None:
    """Refuses what can be no replica's id.

    Raises:
        TypeError: If it is not an int; a bool is none.
        ValueError: If it is negative.
    """
    if not isinstance(replica, int) or isinstance(replica, bool):
        raise TypeError(
            f"{what}: a replica is named by its id, an int from 0; got {replica!r}, "
            f"{_a(replica)}."
        )
    if replica < 0:
        raise ValueError(
            f"{what}: a replica is named by its id, which is 0 or more; got {replica}."
        )


def refuse_unknown_replica(what: str, replica: int, num_replicas: int) -> None:
    """Refuses a replica that the strategy that is run does not have.

    Raises:
        ValueError: If there are too few replicas.
    """
    if replica >= num_replicas:
        raise ValueError(
            f"{what} names replica {replica}, and a strategy of "
            f"{plural(num_replicas, 'replica')} was run in its block: its ids end at "
            f"{num_replicas - 1}. Name another replica, or run a strategy of more."
        )


def refuse_in_replica(what: str) -> None:
    """Refuses to be entered in a step, where each replica would enter it for itself.

    Raises:
        RuntimeError: If this is a replica.
    """
    frame = current_frame()
    if frame is not None and frame.replica_context is not None:
        raise RuntimeError(
            f"{what} was called in replica "
            f"{frame.replica_context.replica_id_in_sync_group}. It is about all "
            "replicas of a run: put it around strategy.run, not into the step."
        )


def _a(value: object) -> str:
    return an(type(value).__name__)
