"""The ranks of a run, and what they exchange."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import final

import torch

from torchstrategy.testing._ranks.exchanges import (
    Call,
    Exchange,
    Part,
    UnlikeCalls,
    place_of_sender,
    rank_at,
)
from torchstrategy.testing._ranks.happened import Happened
from torchstrategy.testing._ranks.lines import line_of_the_user
from torchstrategy.testing._ranks.record import RankRecord
from torchstrategy.testing._ranks.swaps import Swaps
from torchstrategy.testing._ranks.turns import RanksStopped, Turns
from torchstrategy.testing._ranks.witnesses import work_witnesses


@final
class Notes:
    """What the ranks keep in one store.

    Attributes:
        values: The value of each key.
        queues: The values that were pushed to each key, and not popped yet.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}


@final
class World:
    """One run of `run_ranks`.

    Args:
        size: How many ranks it has.
        turns: Whose turn it is.
        came_to: Called with a rank and the kind of collective that it comes to, for
            faults.
        record: Gets the collectives.
    """

    def __init__(
        self,
        size: int,
        turns: Turns,
        came_to: Callable[[int, str], None],
        record: RankRecord,
    ) -> None:
        self.size, self.turns, self.came_to = size, turns, came_to
        self.record = record
        self.happened = Happened(size)
        # The stores of `torch.distributed`, by their names.
        self.stores: dict[str, Notes] = {}
        self._open: dict[Hashable, Exchange] = {}
        # Messages without a receiver, by its address.
        self._posted: dict[Hashable, deque[Exchange]] = {}
        self._swaps = Swaps()
        self._parts: dict[int, list[Part]] = {rank: [] for rank in range(size)}

    def meet(
        self, rank: int, key: Hashable, ranks: Sequence[int], name: str, call: Call
    ) -> Part:
        """A rank calls a collective, which the other ranks call with the same `key`.

        Raises:
            RanksStopped: If its call does not fit to that of another rank.
        """
        exchange = self._open.setdefault(key, Exchange(ranks, name))
        part = self._join(exchange, rank, call)
        if not exchange.missing():
            del self._open[key]
            self._check_order(exchange, key)
        return part

    def _check_order(self, exchange: Exchange, key: Hashable) -> None:
        """Refuses collectives that ranks called in another order.

        See Note [What is a swap].
        """
        said = exchange.said()
        group = key[0] if isinstance(key, tuple) else key
        for other in said[1:]:
            if found := self._swaps.find(group, said[0], other):
                self.turns.stop(found)
                raise RanksStopped(found)

    def send(
        self, rank: int, target: int, address: tuple[Hashable, int], call: Call
    ) -> Part:
        """A rank sends a message, which is under way until it is received."""
        group, tag = address
        place = place_of_sender(rank, target)
        for wanted in ((group, tag, rank, target), (group, tag, None, target)):
            if waiting := self._posted.get(("receivers", *wanted)):
                exchange = waiting.popleft()
                exchange.ranks = (place, target)
                return self._join(exchange, place, call)
        exchange = Exchange((place, target), "")
        self._posted.setdefault((group, tag, target), deque()).append(exchange)
        return self._join(exchange, place, call)

    def receive(
        self, rank: int, source: int | None, address: tuple[Hashable, int], call: Call
    ) -> Part:
        """A rank receives a message: of one rank, or, with None, of any."""
        group, tag = address
        posted = self._posted.get((group, tag, rank), deque())
        for exchange in posted:
            if source in (None, rank_at(exchange.ranks[0])):
                posted.remove(exchange)
                return self._join(exchange, rank, call)
        senders = (
            [source]
            if source is not None
            else [other for other in range(self.size) if other != rank] or [rank]
        )
        others = [place_of_sender(sender, rank) for sender in senders]
        exchange = Exchange((*others, rank), "")
        self._posted.setdefault(
            ("receivers", group, tag, source, rank), deque()
        ).append(exchange)
        return self._join(exchange, rank, call)

    def finish(self, rank: int, part: Part, is_early: bool = False) -> None:
        """Waits until a rank has what it gets.

        Args:
            rank: The rank.
            part: Its part in a collective.
            is_early: Whether the program has not asked for it yet, and calls
                `part.receive` when it does.

        Raises:
            RanksStopped: If it cannot get it any more.
        """
        self.turns.wait(rank, part)
        if not is_early:
            part.receive()
        part.deliver()
        part.hear(self.happened)
        for witness in work_witnesses:
            witness.over(rank, part)
        self._parts[rank] = [other for other in self._parts[rank] if other is not part]
        self.turns.pause(rank)

    def finish_before(
        self, rank: int, group: Hashable, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Brings what collectives of a group write on some tensors.

        A later collective of this group uses these.

        Raises:
            RanksStopped: If a rank cannot get it any more.
            RuntimeError: If the program has written there before.
        """
        for part in self._parts[rank]:
            if part.has_to_be_waited_for and part.writes_on(group, tensors):
                self.turns.wait(rank, part)
                part.deliver()
                part.hear(self.happened)

    def is_there(self, rank: int, part: Part) -> bool:
        """Whether a rank has what it gets; lets others run before the answer is no.

        Raises:
            RanksStopped: If it has asked without end, and no other rank can go on.
        """
        if not part.is_over():
            if not self.turns.has_others(rank):
                part.idle_questions += 1
                if part.idle_questions > _MOST_IDLE_QUESTIONS:
                    self.finish(rank, part)
            self.turns.poll(rank)
        if part.is_over():
            self.finish(rank, part)
        return part.is_delivered

    def never_waited_for(self, rank: int) -> list[Part]:
        """The collectives whose results a rank never asked for."""
        return [part for part in self._parts[rank] if part.has_to_be_waited_for]

    def _join(self, exchange: Exchange, place: int, call: Call) -> Part:
        rank = rank_at(place)
        self.turns.check(rank)
        try:
            exchange.join(place, call, line_of_the_user())
        except UnlikeCalls as error:
            self.turns.stop(str(error))
            raise RanksStopped(str(error)) from None
        exchange.clocks[place] = self.happened.clock(rank)
        if exchange.results is not None:
            self.record.collectives.append(exchange.collective())
        part = Part(exchange, place)
        self._parts[rank].append(part)
        return part


_MOST_IDLE_QUESTIONS = 1000


@final
class _Here(threading.local):
    world: World | None = None
    rank = -1


_here = _Here()


def settle_here(world: World | None, rank: int = -1) -> None:
    """Makes this thread a rank of a run, or, with None, of none."""
    _here.world, _here.rank = world, rank


def current_world() -> World | None:
    """The run of which this thread is a rank; None if it is none."""
    return _here.world


def current_rank() -> int:
    """The rank that this thread is."""
    return _here.rank
