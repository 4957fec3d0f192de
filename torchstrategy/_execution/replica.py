"""One replica of one run, as the code that runs in it sees it: it can meet the others.

A meeting is where every replica brings something and gets something back: `combine` runs once, on the thread that
called `run`, while all of them stand still. `merge_call`, `all_reduce` and `optimizer.step` are meetings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import final

from torchstrategy._core.context import nowhere
from torchstrategy._core.devices import in_use
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import held, reached

Combine = Callable[[Sequence[Tree]], Sequence[Tree]]
"""What happens at a meeting: from what each replica brought, in replica order, to what each gets."""


class ReplicaStopped(BaseException):
    """Unwinds a replica because another one failed. Not an `Exception`: no step should catch it and go on."""


class Watch(ABC):
    """What looks on, on the thread that called `run`, whenever a replica of that run goes on or stands still.

    Args:
        take_turns: Whether the replicas should run one at a time, on whichever devices they are.
    """

    def __init__(self, take_turns: bool) -> None:
        self.take_turns = take_turns

    @abstractmethod
    def look(self, running: Collection[int]) -> None:
        """Called with the replicas of which any may have run since the last call; with none after a meeting."""

    @abstractmethod
    def warn(self) -> None:
        """Called after the run, for what is to be said of it."""


class Replica(ABC):
    """One replica of one run, as the code that runs in it sees it."""

    def __init__(self, index: int, device: Device) -> None:
        self.index = index
        self.device = device
        self.was_asked = False  # whether the step asked which replica it is in

    def synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        """Waits until every replica of the run is at a meeting of this name, and returns this replica's share of it.

        Args:
            name: What the meeting is, in the words of the caller of the step: `"optimizer.step()"`.
            combine: Called once, on the thread that called `run`. That of the lowest replica is taken.
            brought: What this replica brings.

        Raises:
            RuntimeError: From `run`, if the replicas are at meetings of different names, or some have ended.
        """
        reached(self.index, name)
        return self._synchronize(name, combine, brought)

    @abstractmethod
    def pause(self) -> None:
        """Stands still until it is this replica's turn again, which may be at once."""

    @abstractmethod
    def _synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        """See `synchronize`."""


@final
class InlineReplica(Replica):
    """The one replica of a run, on the caller's thread: it meets itself.

    Args:
        index: Its id.
        device: Where it runs.
        callers_device: The default device of the caller, for what happens at meetings; None: that of the replica.
    """

    def __init__(self, index: int, device: Device, callers_device: Device | None = None) -> None:
        super().__init__(index, device)
        self._callers_device = callers_device

    def pause(self) -> None:
        pass  # there is nobody else

    def _synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        held(name)
        with nowhere(), in_use(self._callers_device), traced("meeting {}", name):  # as it is where several meet
            return combine([brought])[0]
