"""The clocks of the program: one for it, one for each replica while replicas run, and one for each rank.

Ranks are processes of their own. Replicas share Python's lock. So while several run, what takes the program a
microsecond takes each of them as many as there are replicas; and the next turn goes to the one whose clock is behind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from typing_extensions import override

from torchstrategy._execution.instruments import END, START, Instrument, Turns


@final
class Host:
    """A clock, in seconds, of the program, of one replica or of one rank."""

    def __init__(self, now: float = 0.0, share: int = 1, name: str = "host", rank: int | None = None) -> None:
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
class _Run:
    """A run of a strategy: the clock of its caller, and those of its replicas."""

    def __init__(self, caller: Host, replicas: int) -> None:
        self.hosts = [Host(caller.now, replicas, f"replica {i}") for i in range(replicas)]
        self._caller = caller
        self._running = replicas
        self._have_met = False

    @property
    def is_over(self) -> bool:
        return not self._running

    def next(self, waiting: Sequence[int]) -> int:
        if self._have_met:  # what the caller did for all of them is done
            for host in self.hosts:
                host.now = self._caller.now
            self._have_met = False
        return min(waiting, key=lambda replica: (self.hosts[replica].now, replica))

    def meet(self) -> None:
        """All replicas have come to a point; the caller waits for the last one."""
        self._caller.now = max(self._caller.now, *(host.now for host in self.hosts))
        self._have_met = True

    def ended(self, host: Host) -> None:
        """A replica has ended; the caller waits for it."""
        self._caller.now = max(self._caller.now, host.now)
        self._running -= 1


@final
class _Here(threading.local):
    def __init__(self) -> None:
        self.rank: Host | None = None  # whose thread this is
        self.replica: tuple[_Run, Host] | None = None  # whose thread this is
        self.calls: list[_Run] = []  # the runs that this thread has called


@final
class Hosts(Instrument):
    """Which clock the code is on that runs here."""

    def __init__(self) -> None:
        self.program = Host()
        self._here = _Here()
        self._begun: _Run | None = None
        self._ranks: list[Host] = []  # of a run that has not ended

    def here(self) -> Host:
        """The clock of the replica or rank whose thread this is, or else of the program. Other threads share that."""
        if self._here.replica is not None:
            return self._here.replica[1]
        return self._here.rank or self.program

    def rank_begins(self, rank: int) -> None:
        """Gives the rank whose thread this is a clock of its own."""
        self._here.rank = Host(self.program.now, name=f"rank {rank}", rank=rank)
        self._ranks.append(self._here.rank)

    def ranks_end(self) -> None:
        """Lets the program wait for all ranks."""
        self.program.now = max([self.program.now, *(rank.now for rank in self._ranks)])
        self._ranks.clear()

    def __repr__(self) -> str:
        return "virtual_time()"  # as errors name who gives the turns

    @override
    def _begins(self, num_replicas: int) -> Turns | None:
        self._begun = None
        if num_replicas == 1:
            return None  # it runs on the caller's thread, and so on the caller's clock
        self._begun = _Run(self.here(), num_replicas)
        self._here.calls.append(self._begun)
        return self._begun.next

    @override
    def _reached(self, replica: int, where: str) -> None:
        if where == START and self._begun is not None:
            self._here.replica = self._begun, self._begun.hosts[replica]
        elif where == END and self._here.replica is not None:
            run, host = self._here.replica
            run.ended(host)
            self._here.replica = None

    @override
    def _held(self, point: str) -> None:
        calls = self._here.calls
        while calls and calls[-1].is_over:
            calls.pop()
        if calls:
            calls[-1].meet()
