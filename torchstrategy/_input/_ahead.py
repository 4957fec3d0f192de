"""Reading ahead: the loader is read, and its batches are cut, pinned and copied, while the step before still runs.

    reader                     a worker for each replica           the consumer
                               on an accelerator
    waits for room
    reads an element, deals
    it out, departs ---------> carries its pieces ---------------> waits for the oldest step
    ^                                                              arrives
    +--------------------------- room for one more ----------------+

No thread holds the iterator that it works for: when that is dropped, they end. They speak by queues that a finalizer
may use, at whatever point of the program it runs, and a lock would not do. A step stays with the others until it is
handed over, so Ctrl-C loses none.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import final

import torch

from torchstrategy._caller_state import CallerState
from torchstrategy._devices import canonical
from torchstrategy._input._reading import Reading, Shipment, shipped
from torchstrategy._input._steps import Steps
from torchstrategy._input._transfer import Route
from torchstrategy._types import Device, Tree

_PATIENCE = 5.0  # seconds that closing waits for a loader that is in the middle of a batch


@final
class _Item:
    """A step on its way to the consumer; or the error, or the end, that it will find there."""

    def __init__(self) -> None:
        self.shipment: Shipment | None = None
        self.error: BaseException | None = None
        self.is_end = False
        self.waits_for = 0  # workers
        self.carried: list[int] = []  # the replicas whose workers are done
        self.is_handed_over = False


@final
class _Belt:
    """What the threads share with the consumer.

    Args:
        depth: How many steps may be read and not handed over.
        workers: The replicas that have a worker.
    """

    def __init__(self, depth: int, workers: Sequence[int]) -> None:
        self.items: deque[_Item] = deque()
        self.room: SimpleQueue[None] = SimpleQueue()
        self.news: SimpleQueue[None] = SimpleQueue()  # that the consumer may find something changed
        self.inboxes: dict[int, SimpleQueue[_Item | None]] = {r: SimpleQueue() for r in workers}
        self.failure: BaseException | None = None  # of a thread itself
        self.is_closed = False
        for _ in range(depth):
            self.room.put(None)

    def close(self) -> None:
        """Tells the threads to end."""
        self.is_closed = True
        self.room.put(None)
        for inbox in self.inboxes.values():
            inbox.put(None)


def _read(steps: Steps, routes: Sequence[Route], belt: _Belt) -> None:
    """The life of the reader."""
    unused = 0  # of the rooms that were seen while it waited for something else
    while True:
        if unused:
            unused -= 1
        else:
            belt.room.get()
        if belt.is_closed:
            return
        item = _Item()
        try:
            item.shipment = shipped(steps, routes)
            item.waits_for = len(belt.inboxes)
        except StopIteration:
            item.is_end = True
        except BaseException as error:
            item.error = error
        belt.items.append(item)
        belt.news.put(None)
        if item.is_end:
            return
        for inbox in belt.inboxes.values() if item.shipment is not None else ():
            inbox.put(item)
        # After an error the loader is asked again only if the consumer asks again.
        while item.error is not None and not item.is_handed_over:
            belt.room.get()
            unused += 1
            if belt.is_closed:
                return
        del item  # it holds a batch


def _work(replica: int, route: Route, belt: _Belt) -> None:
    """The life of a replica's worker."""
    inbox = belt.inboxes[replica]
    while (item := inbox.get()) is not None and not belt.is_closed:
        assert item.shipment is not None
        try:
            item.shipment.cargo[replica] = route.carry(item.shipment.cargo[replica])
        except BaseException as error:
            item.error = error
        item.carried.append(replica)
        belt.news.put(None)
        del item


def _live(state: CallerState, device: Device, life: Callable[[], None], belt: _Belt) -> None:
    """Runs on a new thread."""
    try:
        state.run_in(device, life)
    except BaseException as error:
        belt.failure = error
        belt.news.put(None)


def _end(belt: _Belt, threads: Sequence[threading.Thread], process: int) -> None:
    """Ends the threads. Runs on any thread, also on one of theirs, where garbage may be collected."""
    if os.getpid() != process:
        return  # a forked process has none of them
    belt.close()
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(_PATIENCE)
    belt.items.clear()


@final
class Ahead(Reading):
    """Reads ahead on a thread of its own, which is started when the first step is asked for.

    Args:
        steps: What is read.
        routes: The way to each replica.
        depth: How many steps may be read and not handed over.
    """

    def __init__(self, steps: Steps, routes: Sequence[Route], depth: int) -> None:
        self._steps: Steps | None = steps
        self._routes = routes
        self._belt = _Belt(depth, [r for r, route in enumerate(routes) if route.has_copies])
        self._process = os.getpid()
        self._finalizer: weakref.finalize[..., Ahead] | None = None

    def next(self) -> Tree:
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator was made in another process, whose threads read its batches; they are not here. "
                "Iterate over the dataset anew in this process."
            )
        if self._finalizer is None:
            if self._steps is None:
                raise StopIteration
            self._start(self._steps)
        belt = self._belt
        if belt.is_closed:
            raise StopIteration
        while not (belt.items and len(belt.items[0].carried) == belt.items[0].waits_for):
            if belt.failure is not None:
                raise belt.failure
            belt.news.get()
        return self._handed_over(belt.items[0])

    def close(self) -> None:
        self._steps = None
        if self._finalizer is not None:
            self._finalizer()

    def _handed_over(self, item: _Item) -> Tree:
        belt, element = self._belt, None
        if item.is_end:
            self.close()
            raise StopIteration
        if item.error is None:
            assert item.shipment is not None
            element = item.shipment.received(self._routes)
        item.is_handed_over = True
        belt.room.put(None)
        belt.items.popleft()
        error = item.error
        try:
            if error is not None:
                raise error
        finally:
            del error, item  # which would hold this frame, by the error's traceback
        return element

    def _start(self, steps: Steps) -> None:
        belt, routes = self._belt, self._routes
        default = torch.get_default_device()
        here = canonical("cpu" if default.type == "meta" else default)
        devices = {r: routes[r].device or here for r in belt.inboxes}
        state = CallerState.take((here, *devices.values()))
        lives: list[tuple[str, Device, Callable[[], None]]] = [("reader", here, partial(_read, steps, routes, belt))]
        for r, device in devices.items():
            lives.append((f"prefetch-{r}", device, partial(_work, r, routes[r], belt)))
        threads = [
            threading.Thread(target=_live, args=(state, device, life, belt), name=f"torchstrategy-{name}", daemon=True)
            for name, device, life in lives
        ]
        self._steps = None  # from here on they are the reader's
        self._finalizer = weakref.finalize(self, _end, belt, threads, self._process)
        try:
            for thread in threads:
                thread.start()
        except BaseException:
            self.close()
            raise
