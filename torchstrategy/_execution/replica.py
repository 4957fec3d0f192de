"""One replica of one run: it can synchronize with the others.

At a synchronization point, every replica brings a value and gets a result. When all replicas are there, the function
`combine` runs once, on the thread that called `run`, while all replicas stand still. `merge_call`, `all_reduce` and
`optimizer.step` are synchronization points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, final

from torchstrategy._core.context import nowhere
from torchstrategy._core.devices import in_use
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import held, reached

Combine = Callable[[Sequence[Tree]], Sequence[Tree]]
"""The function of a synchronization point: it takes the values that the replicas brought and returns their results.

Both are in replica order.
"""


class ReplicaStopped(BaseException):
    """Stops a replica because another one failed.

    It is not an `Exception`, so that a step with `except Exception` does not catch it and go on.
    """


class Watch(Protocol):
    """An observer, which is called on the thread that called `run`, whenever a replica goes on or stands still.

    Attributes:
        take_turns: Whether the replicas should run one at a time, whichever devices they are on.
    """

    take_turns: bool

    def look(self, running: Collection[int]) -> None:
        """Called with the replicas that may have run since the last call; with none after a synchronization point."""

    def warn(self) -> None:
        """Called after the run, to give warnings about it."""


class Replica(ABC):
    """One replica of one run."""

    def __init__(self, index: int, device: Device) -> None:
        self.index = index
        self.device = device
        self.was_asked = False  # whether the step asked which replica it is in

    @abstractmethod
    def synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        """Waits until every replica of the run is at this synchronization point, and returns this replica's result.

        Args:
            name: The name of the synchronization point, as the user would write it: `"optimizer.step()"`.
            combine: Called once, on the thread that called `run`. Of the replicas' functions, that of the lowest
                replica is called.
            brought: The value that this replica brings.

        Raises:
            RuntimeError: From `run`, if the replicas are at different synchronization points, or some have ended.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stands still until it is this replica's turn again, which may be at once."""


@final
class InlineReplica(Replica):
    """The only replica of a run, on the caller's thread. It is alone at its synchronization points.

    Args:
        index: The id of the replica.
        device: The device on which it runs.
        callers_device: The default device of the caller, in which `combine` runs. None: that of the replica.
    """

    def __init__(self, index: int, device: Device, callers_device: Device | None = None) -> None:
        super().__init__(index, device)
        self._callers_device = callers_device

    def pause(self) -> None:
        pass  # no other replica could go on meanwhile

    def synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        reached(self.index, name)
        held(name)
        # With several replicas, `combine` runs on the caller's thread, outside of all replicas. Here the replica is on
        # the caller's thread, so its frame and its default device have to be put aside for a while. See Note
        # [Who may call what on which thread].
        with nowhere(), in_use(self._callers_device), traced("synchronize at {}", name):
            return combine([brought])[0]
