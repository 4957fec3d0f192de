"""The clocks of replicas in virtual time: one for each, while several run.

Replicas share Python's lock. So while several run, what takes the program a microsecond
takes each of them as many as there are replicas; and the next turn goes to the one
whose clock is behind. Virtual time itself knows no strategies: this file comes into its
blocks by `also_in_each_block`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from typing_extensions import override

from torchstrategy._group.instruments import END, START, Instrument, Turns
from torchstrategy.testing._instruments import in_force
from torchstrategy.testing._refusals import refuse_in_replica
from torchstrategy.testing._virtual_time.hosts import Host, Hosts


def clocks_of_replicas(hosts: Hosts) -> AbstractContextManager[None]:
    """A block in which each replica of a run has a clock among `hosts`.

    Use it within a block of virtual time.

    Raises:
        RuntimeError: In a replica, where each replica would begin a block of its own.
    """
    refuse_in_replica("virtual_time")
    return in_force(_ReplicaClocks(hosts))


@final
class _Run:
    """A run of a strategy: the clock of its caller, and those of its replicas."""

    def __init__(self, caller: Host, replicas: int) -> None:
        self.hosts = [
            Host(caller.now, replicas, f"replica {i}") for i in range(replicas)
        ]
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

    def ended(self, replica: int) -> None:
        """A replica has ended; the caller waits for it."""
        self._caller.now = max(self._caller.now, self.hosts[replica].now)
        self._running -= 1


@final
class _Here(threading.local):
    def __init__(self) -> None:
        self.run: _Run | None = None  # of the replica whose thread this is
        self.calls: list[_Run] = []  # the runs that this thread has called


@final
class _ReplicaClocks(Instrument):
    """Gives the replicas of each run clocks, and turns by these clocks."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._here = _Here()
        self._begun: _Run | None = None

    def __repr__(self) -> str:
        return "virtual_time()"  # as errors name who gives the turns

    @override
    def _begins(self, num_replicas: int) -> Turns | None:
        self._begun = None
        if num_replicas == 1:
            return None  # it runs on the caller's thread, and so on the caller's clock
        self._begun = _Run(self._hosts.here(), num_replicas)
        self._here.calls.append(self._begun)
        return self._begun.next

    @override
    def _reached(self, replica: int, where: str) -> None:
        if where == START and self._begun is not None:
            self._here.run = self._begun
            self._hosts.give(self._begun.hosts[replica])
        elif where == END and self._here.run is not None:
            self._here.run.ended(replica)
            self._here.run = None
            self._hosts.give(None)

    @override
    def _held(self, point: str) -> None:
        calls = self._here.calls
        while calls and calls[-1].is_over:
            calls.pop()
        if calls:
            calls[-1].meet()
