"""One rank runs at a time, and hands over only where it has to wait.

So a run is the same each time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from torchstrategy.testing._ranks.orders import Order


class Wait(ABC):
    """What a rank waits for.

    Attributes:
        timeout: The seconds after which the program goes on without it. None: it never
            does.
        is_late: Whether they have passed. Nothing here waits for a clock: they pass
            where no rank can go on.
    """

    timeout: float | None = None
    is_late = False

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the rank can go on."""

    @abstractmethod
    def describe(self) -> str:
        """What it waits for, for a message: `waits in all_reduce #8 ... for rank 2`."""


@final
class RanksStopped(RuntimeError):
    """The ranks of `run_ranks` cannot go on; the message says who waits where for whom.

    All ranks that wait raise it, so that their `finally` blocks run. `run_ranks` raises
    it if no rank raised an error of its own.

    Example:
        >>> def main(rank):
        ...     torch.distributed.init_process_group("gloo")
        ...     if rank == 0:
        ...         torch.distributed.barrier()
        >>> try:
        ...     torchstrategy.testing.run_ranks(main, 2)
        ... except torchstrategy.testing.RanksStopped as error:
        ...     print(str(error).splitlines()[0])
        No rank can go on:
    """


@final
class _Rank:
    """The state of one rank, as the others see it."""

    def __init__(self) -> None:
        self.may_run = threading.Semaphore(0)
        self.thread: int | None = None
        self.wait: Wait | None = None
        self.is_polling = False
        self.ended: str | None = None


@final
class Turns:
    """Whose turn it is.

    Args:
        n: How many ranks there are.
        order: Who goes on, of those that can.
        enter: Called on a rank's thread when its turn begins.
        leave: Called there when it ends.
    """

    def __init__(
        self,
        n: int,
        order: Order,
        enter: Callable[[int], None],
        leave: Callable[[int], None],
    ) -> None:
        self._order = order
        self._ranks = {rank: _Rank() for rank in range(n)}
        self._enter, self._leave = enter, leave
        self._why_stopped: str | None = None
        self.running = 0  # the rank whose turn it is, or was last
        self.stuck: dict[int, str] = {}  # where ranks waited when the run was stopped

    def start(self) -> None:
        """Gives the first rank its turn."""
        self._pass_on()

    def begin_here(self, rank: int) -> None:
        """Gives a rank its first turn, on its thread, which is this one."""
        self._ranks[rank].thread = threading.get_ident()
        self.running = rank

    def begin(self, rank: int) -> None:
        """Waits for the first turn of a rank, on its thread."""
        self._ranks[rank].thread = threading.get_ident()
        self._ranks[rank].may_run.acquire()
        self._enter(rank)

    def end(self, rank: int, how: str) -> None:
        """Passes the turn on for good.

        Args:
            rank: The rank that has it.
            how: How it ended, for messages: `has ended`.
        """
        try:
            self._leave(rank)
        finally:
            self._ranks[rank].ended = how
            self._pass_on()

    def give_up(self, rank: int) -> None:
        """Passes the turn on in place of a rank whose thread was ended in its turn."""
        if self._ranks[rank].ended is None and self.running == rank:
            self._ranks[rank].ended = "has been ended"
            self._pass_on()

    def wait(self, rank: int, wait: Wait) -> None:
        """Lets others run until what a rank waits for is there.

        Raises:
            RanksStopped: If it cannot come any more.
        """
        self.check(rank)
        if wait.is_over():
            return
        self._ranks[rank].wait = wait
        self._hand_over(rank)
        self._ranks[rank].wait = None
        if not wait.is_over():
            self.check(rank)

    def pause(self, rank: int) -> None:
        """Lets another rank go on for one that need not wait, if the order is drawn.

        Raises:
            RanksStopped: If the run was stopped.
        """
        if self._order.is_drawn:
            self.check(rank)
            self._hand_over(rank)
            self.check(rank)

    def poll(self, rank: int) -> None:
        """Lets other ranks run as far as they can, for a rank that asks repeatedly.

        The rank asks whether something is there.
        """
        self.check(rank)
        self._ranks[rank].is_polling = True
        self._hand_over(rank)
        self._ranks[rank].is_polling = False
        self.check(rank)

    def check(self, rank: int) -> None:
        """Refuses to go on in a run that was stopped.

        Raises:
            RanksStopped: If it was stopped.
            RuntimeError: On another thread than the rank's.
        """
        if self._ranks[rank].thread != threading.get_ident():
            raise RuntimeError(
                f"rank {rank} called a collective on thread "
                f"{threading.current_thread().name!r}, which it started. In run_ranks "
                "each rank is one thread, and collectives belong there: nobody could "
                "say in which order those of two threads come."
            )
        if self._why_stopped is not None:
            raise RanksStopped(self._why_stopped)

    def refuse_to_wait_for_thread(self, thread: int, wait: Wait) -> None:
        """Stops the run if the rank whose turn it is would wait for another rank.

        A rank may wait in `wait` only.

        That rank could not go on before this one hands over, which it never would.

        Args:
            thread: For which this thread would wait.
            wait: What it would wait for.

        Raises:
            RanksStopped: If this thread and the other one are ranks.
        """
        ranks = {
            state.thread: rank
            for rank, state in self._ranks.items()
            if state.ended is None
        }
        mine, other = ranks.get(threading.get_ident()), ranks.get(thread)
        if mine is None or other is None or mine == other:
            return
        self._ranks[mine].wait = wait
        self.stop(f"No rank can go on:\n{self.situation()}")
        self._ranks[mine].wait = None
        self.check(mine)

    def stop(self, why: str) -> None:
        """Lets all ranks that wait raise an error when their turn comes.

        All other ranks raise it when they next wait.
        """
        if self._why_stopped is None:
            self._why_stopped = why
            waits = {
                rank: state.wait
                for rank, state in self._ranks.items()
                if state.ended is None
            }
            self.stuck = {
                rank: wait.describe()
                for rank, wait in waits.items()
                if wait and not wait.is_over()
            }

    def has_others(self, rank: int) -> bool:
        """Whether another rank than this one can go on."""
        return any(other != rank and self._can_go_on(other) for other in self._ranks)

    def situation(self) -> str:
        """Where each rank is, a line for each."""
        return "\n".join(f"  rank {rank} {self._where(rank)}" for rank in self._ranks)

    def _where(self, rank: int) -> str:
        state = self._ranks[rank]
        if state.ended is not None:
            return state.ended
        return state.wait.describe() if state.wait is not None else "runs"

    def _hand_over(self, rank: int) -> None:
        self._leave(rank)
        self._pass_on()
        self._ranks[rank].may_run.acquire()
        self._enter(rank)

    def _pass_on(self) -> None:
        following = self._choose()
        if following is None and self._let_time_pass():
            following = self._choose()
        if following is None and any(
            state.ended is None for state in self._ranks.values()
        ):
            self.stop(f"No rank can go on:\n{self.situation()}")
            following = self._choose()
        if following is not None:
            self.running = following
            self._ranks[following].may_run.release()

    def _let_time_pass(self) -> bool:
        """Whether the time of a wait has passed now, of which the shortest."""
        waits = [
            state.wait
            for state in self._ranks.values()
            if state.ended is None and state.wait is not None
        ]
        limits = [(wait.timeout, wait) for wait in waits if wait.timeout is not None]
        if limits:
            min(limits, key=lambda limit: limit[0])[1].is_late = True
        return bool(limits)

    def _choose(self) -> int | None:
        able = [rank for rank in self._ranks if self._can_go_on(rank)]
        working = [rank for rank in able if not self._ranks[rank].is_polling]
        return self._order.choose(working or able) if able else None

    def _can_go_on(self, rank: int) -> bool:
        state = self._ranks[rank]
        if state.ended is not None:
            return False
        return (
            self._why_stopped is not None
            or state.wait is None
            or state.wait.is_late
            or state.wait.is_over()
        )
