"""The clocks of the program: one for it, and one for each rank.

Other code may give clocks to its own threads.

Ranks are processes of their own. Threads of one process share Python's lock: a clock
with a `share` of 3 is one of three that go on at the same time, and what takes the
program a microsecond takes each of them three.

Who else has a clock of their own is not known here. `also_in_each_block` lets others,
such as strategies with their replicas, come into each block of virtual time, and give
their threads clocks there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final


@final
class Host:
    """A clock, in seconds, of the program, of one replica or of one rank."""

    def __init__(
        self,
        now: float = 0.0,
        share: int = 1,
        name: str = "host",
        rank: int | None = None,
    ) -> None:
        self.now = now
        self.done = now  # when all work is done that it has put on streams
        self.name = name
        self.rank = rank
        self._share = share  # how many replicas run Python

    @property
    def is_rank(self) -> bool:
        """Whether it is the clock of a rank."""
        return self.rank is not None

    def spend(self, seconds: float) -> None:
        """Lets the program be busy for a while."""
        self.now += seconds * self._share

    def wait_until(self, moment: float) -> float:
        """Lets the program wait for a moment, and returns for how long."""
        waited = max(0.0, moment - self.now)
        self.now += waited
        return waited


@final
class _Here(threading.local):
    def __init__(self) -> None:
        self.rank: Host | None = None  # whose thread this is
        # The clock that somebody has given to this thread.
        self.given: Host | None = None


@final
class Hosts:
    """Which clock the code is on that runs here."""

    def __init__(self) -> None:
        self.program = Host()
        # Whether others have given clocks, which they may set as they like.
        self.were_given = False
        self._here = _Here()
        self._ranks: list[Host] = []  # of a run that has not ended

    def here(self) -> Host:
        """The clock of this thread, or of its rank, or else of the program."""
        return self._here.given or self._here.rank or self.program

    def give(self, host: Host | None) -> None:
        """Gives this thread a clock of its own; None: takes it away."""
        self.were_given = True
        self._here.given = host

    def rank_begins(self, rank: int) -> Host:
        """Gives the rank whose thread this is a clock of its own."""
        self._here.rank = Host(self.program.now, name=f"rank {rank}", rank=rank)
        self._ranks.append(self._here.rank)
        return self._here.rank

    def ranks_end(self) -> None:
        """Lets the program wait for all ranks."""
        self.program.now = max([self.program.now, *(rank.now for rank in self._ranks)])
        self._ranks.clear()


# Returns what is entered with each block of virtual time, for the clocks of that block.
ClocksOfOthers = Callable[[Hosts], AbstractContextManager[object]]

_others: list[ClocksOfOthers] = []


def also_in_each_block(clocks_of_others: ClocksOfOthers) -> None:
    """Lets each block of virtual time also enter a block of other code.

    That code has threads with clocks of their own.

    It is entered before anything else of the block, so that it may refuse the block.
    """
    _others.append(clocks_of_others)


def of_others() -> tuple[ClocksOfOthers, ...]:
    """What `also_in_each_block` was called with."""
    return tuple(_others)
