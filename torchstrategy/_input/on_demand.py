"""Reading when the caller asks for a step, on the caller's thread; `prefetcher` reads ahead instead."""

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
    """The batch of one step, whose parts are being copied to the replicas' devices."""

    split_batch: SplitBatch | Whole
    marks: list[ResumePoint]
    staged: list[StagedBatch]

    def received(self, routes: Sequence[Route]) -> Tree:
        """The element, made of the parts on the devices. Runs on the consumer's thread."""
        # See Note [Promises for a copied batch].
        arrived = list(map(Route.receive, routes, self.staged))
        for mark in self.marks:
            mark.reach()
        return self.split_batch.assembled(arrived)


def transferred(steps: Steps, routes: Sequence[Route]) -> BatchTransfer:
    """Reads the batch of the next step and stages its parts. Runs on the reading thread.

    Raises:
        StopIteration: If there is none.
    """
    with traced("split a batch"):
        split_batch, marks = next(steps)
        return BatchTransfer(split_batch, marks, list(map(Route.stage, routes, split_batch.parts())))


class Reading(ABC):
    """One epoch over a dataset, read step by step."""

    @abstractmethod
    def next(self) -> Tree:
        """The element that the replicas get in the next step.

        Raises:
            StopIteration: If there is none.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the epoch, and the threads and workers that it has started."""

    @abstractmethod
    def ending(self) -> Callable[[], None]:
        """A function that ends the epoch, and waits until nobody reads the loader. It holds no reference to `self`."""


@final
class OnDemand(Reading):
    """Reads on the caller's thread, when the caller asks for a step. There is no other thread.

    On an accelerator, the copies still overlap with the previous step: its kernels are queued on the current stream,
    and the copies are on a stream of their own.
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
        self._steps = None  # the loader's workers end with its iterator

    def ending(self) -> Callable[[], None]:
        found = weakref.ref(self)

        def end() -> None:
            if (reading := found()) is not None:
                reading.close()

        return end
