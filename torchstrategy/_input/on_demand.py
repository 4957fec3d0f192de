"""When steps are read: when they are asked for, on the caller's thread; `_ahead` has the other way."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torchstrategy._core.trace import traced
from torchstrategy._core.types import Tree
from torchstrategy._input.device_transfer import Route, StagedBatch
from torchstrategy._input.splitting import SplitBatch, Whole
from torchstrategy._input.steps import ResumePoint, Steps


class BatchTransfer(NamedTuple):
    """A step, and what each replica gets of it, on its way."""

    split_batch: SplitBatch | Whole
    marks: list[ResumePoint]
    staged: list[StagedBatch]

    def received(self, routes: Sequence[Route]) -> Tree:
        """The element, once its pieces are there. Runs on the consumer's thread."""
        arrived = list(map(Route.receive, routes, self.staged))
        for mark in self.marks:
            mark.reach()
        return self.split_batch.assembled(arrived)


def transferred(steps: Steps, routes: Sequence[Route]) -> BatchTransfer:
    """The next step, departed. Runs on the reading thread.

    Raises:
        StopIteration: If there is none.
    """
    with traced("deal a batch"):
        split_batch, marks = next(steps)
        return BatchTransfer(split_batch, marks, list(map(Route.stage, routes, split_batch.parts())))


class Reading(ABC):
    """One pass over a dataset, step by step."""

    @abstractmethod
    def next(self) -> Tree:
        """What the replicas are given for the next step.

        Raises:
            StopIteration: If there is none.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends it, with all that it has started."""

    @abstractmethod
    def ending(self) -> Callable[[], None]:
        """What ends it and waits until the loader is not read any more, and does not hold it."""


@final
class OnDemand(Reading):
    """Reads on the thread that asks, when it asks. There is no other thread.

    On an accelerator the copies still overlap with the step before: that is queued, and they are on their own stream.
    """

    def __init__(self, steps: Steps, routes: Sequence[Route]) -> None:
        self._steps: Steps | None = steps
        self._routes = routes

    def next(self) -> Tree:
        if self._steps is None:
            raise StopIteration
        transfer = transferred(self._steps, self._routes)
        for r, route in enumerate(self._routes):
            if route.has_copies:
                transfer.staged[r] = route.copy(transfer.staged[r])
        return transfer.received(self._routes)

    def close(self) -> None:
        self._steps = None  # and with it the loader's workers

    def ending(self) -> Callable[[], None]:
        found = weakref.ref(self)

        def end() -> None:
            if (reading := found()) is not None:
                reading.close()

        return end
