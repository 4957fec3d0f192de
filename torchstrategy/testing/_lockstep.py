"""Blocks of the replicas' code, in an order that the test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

from typing_extensions import Self

from torchstrategy._base.context import current_frame
from torchstrategy._base.errors import an
from torchstrategy._group.instruments import Instrument, Turns, tell_reached
from torchstrategy.replica_context import ReplicaContext
from torchstrategy.testing._instruments import in_force, is_in_force
from torchstrategy.testing._ranks.orders import Drawn, seed_of, with_a_seed
from torchstrategy.testing._refusals import (
    refuse_bad_replica,
    refuse_in_replica,
    refuse_unknown_replica,
)


@final
class Lockstep(Instrument):
    """A context manager in which replicas run one block at a time, in a chosen order.

    A block is what a replica runs between two stops: its start, each synchronization
    point, each `point`, its end. This is how a test finds out whether a step depends on
    who is first. On real devices the order is up to the machine; here replicas of
    different devices take turns too, so that a failure can be had again.

    Each run goes through `order` from its beginning, and again when it is at its end. A
    replica that cannot go on (it waits at a synchronization point, has ended, or sits
    the step out) is passed over; those that `order` does not name go when none of the
    others can, in replica order. What the step computes should not depend on any of
    this.

    Args:
        order: Ids of replicas: `[1, 0]`, or `[0, 0, 1]` for two blocks of one and a
            block of the other. `"reversed"`: the last replica first, each time.
            `"random:7"`: one that is drawn from the seed 7, each time; `"random"`: the
            same with a new seed, which `repr` shows.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with torchstrategy.testing.Lockstep([1, 0]) as lockstep:
        ...     total = strategy.run(
        ...         lambda: torchstrategy.get_replica_context().all_reduce("sum", 1)
        ...     )
        >>> lockstep.history
        [(1, 'start'), (1, 'all_reduce(SUM)'), (0, 'start'), (0, 'all_reduce(SUM)'), (1, 'end'), (0, 'end')]

    Raises:
        TypeError: If `order` is neither a sequence of ints nor a string.
        ValueError: If it is empty, names a negative id or is no name of an order; from
            `run`, if the strategy has no such replica.
        RuntimeError: When it is entered in a replica or for a second time; from `run`,
            if something else gives turns.
    """  # noqa: E501

    def __init__(self, order: Sequence[int] | str) -> None:
        if not isinstance(order, Sequence):
            raise TypeError(
                "An order is a sequence of replica ids, such as [1, 0], or 'random:7'; "
                f"got {order!r}."
            )
        if not order:
            raise ValueError(
                "An order of no replicas is none: name at least one, such as [1, 0]."
            )
        self._named = with_a_seed(order) if isinstance(order, str) else ""
        self._order = () if isinstance(order, str) else tuple(order)
        for replica in self._order:
            refuse_bad_replica(repr(self), replica)
        self._history: list[tuple[int, str]] = []
        self._block: ExitStack | None = None
        # All runs of a block share it, so that each goes differently.
        self._drawn: Drawn | None = None

    @property
    def history(self) -> list[tuple[int, str]]:
        """The stops that replicas came to, as (replica, where), in order of time.

        Synchronization points have the names that errors give them:
        `"optimizer.step()"`, `"all_reduce(SUM)"`, `"merge_call"`. A replica that raises
        has no `"end"`. Runs within a run, from a merge function, are in it too.
        """
        return list(self._history)

    def point(self, name: str) -> None:
        """A stop in the middle of the step, where the turn may go to another replica.

        Does nothing outside of replicas, and outside of the block; so it may stay in
        the step.

        Args:
            name: What the history calls it.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> with torchstrategy.testing.Lockstep([0, 1]) as lockstep:
            ...     strategy.run(lambda: lockstep.point("half-way"))
            >>> lockstep.history
            [(0, 'start'), (0, 'half-way'), (1, 'start'), (1, 'half-way'), (0, 'end'), (1, 'end')]

        Raises:
            TypeError: If the name is not a string.
        """  # noqa: E501
        if not isinstance(name, str):
            raise TypeError(
                f"A point has a name, a string; got {name!r}, "
                f"{an(type(name).__name__)}."
            )
        frame = current_frame()
        context = None if frame is None else frame.replica_context
        if (
            isinstance(context, ReplicaContext)
            and context._group is not None
            and is_in_force(self)
        ):
            tell_reached(context.replica_id_in_sync_group, name)
            context._group.replica.pause()

    def __enter__(self) -> Self:
        refuse_in_replica("Lockstep")
        if self._block is not None:
            raise RuntimeError(
                f"{self!r} is entered already. Leave its block first, or make another "
                "one."
            )
        self._history.clear()
        self._drawn = (
            Drawn(seed_of(self._named)) if self._named.startswith("random") else None
        )
        self._block = ExitStack()
        self._block.enter_context(in_force(self))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._block is not None
        self._block.close()
        self._block = None

    def __repr__(self) -> str:
        return (
            f"Lockstep({self._named!r})"
            if self._named
            else f"Lockstep({list(self._order)})"
        )

    def _begins(self, num_replicas: int) -> Turns:
        if (drawn := self._drawn) is not None:
            return lambda waiting: drawn.choose(sorted(waiting))
        if self._named:
            return max
        refuse_unknown_replica(repr(self), max(self._order), num_replicas)
        return _Turns(self._order).next

    def _reached(self, replica: int, where: str) -> None:
        self._history.append((replica, where))


@final
class _Turns:
    """How far one run has come in an order."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._position = 0

    def next(self, waiting: Sequence[int]) -> int:
        for ahead in range(len(self._order)):
            replica = self._order[(self._position + ahead) % len(self._order)]
            if replica in waiting:
                self._position += ahead + 1
                return replica
        return waiting[0]
