"""How the replicas' parts of a batch come to their devices, and when: as the caller asks for a step, or ahead of that.

Three kinds of threads may work on a replica's part; without prefetching, all three are the caller's thread:

    reading thread     `stage`    moves tensors that are on an accelerator already: its current stream has made them
    replica's worker   `copy`     pins tensors in host memory and copies them, on the copy stream of the device
    consumer's thread  `receive`  makes its current stream wait for both, and keeps their memory until it is used

Ahead, batches are read, split, pinned and copied:

    reader                     a worker for each replica           the consumer
                               on an accelerator
    waits for room
    reads and splits a batch,
    stages its parts --------> copies its parts -----------------> waits for the oldest step
    ^                                                              receives its parts
    +--------------------------- room for one more ----------------+

The threads do not keep the iterator alive that they work for, and end when it is dropped. They use only queues to talk
to each other, since a finalizer may use a queue at any point of the program; with a lock, it could wait for ever. A
step stays in the queue until the consumer has received it, so that Ctrl-C loses no step.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, final

import torch

from torchstrategy._communication.transfer import copy_stream
from torchstrategy._core.context import CallerState, is_accelerator
from torchstrategy._core.devices import canonical_device, local_accelerators, memory_device
from torchstrategy._core.distributed_values import ABSENT, Unmade
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device, Tree
from torchstrategy._input.batch_types import applied_within, memory_of, moved
from torchstrategy._input.steps import SplitBatch, Steps


class StagedBatch(NamedTuple):
    """The part of a batch for one replica, which is being copied or has been copied."""

    parts: list[Tree]
    moved: list[torch.Tensor]  # the tensors that the consumer's stream has to wait for
    events: list[torch.Event]  # they happen when these tensors are on the device


# Note [Promises for a copied batch]
# A batch is copied to an accelerator on other streams than the consumer's, so the consumer is given two promises:
# 1. Its stream reads a tensor only when the copy is complete. `stage` and `copy` record an event after their copies,
#    and `receive` makes the consumer's current stream wait for it. The consumer's thread does not wait.
# 2. The memory of a tensor is kept until its stream has used it. The copies of `copy` are allocated on the copy stream,
#    those of `stage` on the current stream of the reading thread. When the consumer drops one, the allocator would give
#    its memory to the next copy at once, though kernels that read it may still be queued on the consumer's stream.
#    `record_stream` makes the allocator wait for these.
# Without prefetching, the consumer's thread is the reading thread, so that for the tensors of `stage` both streams are
# one, and both promises are kept anyway.
# Both are given in `receive`, since only the consumer's thread knows on which stream the batch will be used.
@final
class Route:
    """The way to the device of one replica.

    Args:
        device: The device to which tensors are copied. None: they stay where they are.
    """

    def __init__(self, device: Device | None) -> None:
        self.device = None if device is None else memory_device(device)
        self.has_copies = device is not None and is_accelerator(device)  # whether a worker could copy ahead

    def stage(self, parts: Sequence[Tree]) -> StagedBatch:
        """Moves tensors that are on an accelerator. Runs on the reading thread, on its current streams."""
        sent: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if self.device is None or tensor.is_cpu:
                return tensor
            there = tensor.to(self.device, non_blocking=self.has_copies)
            if self.has_copies:
                sent.append(there)
            return there

        departed = [self._sent_later(part) if type(part) is Unmade else applied_within(part, move) for part in parts]
        events = [torch.accelerator.current_stream(self.device).record_event()] if sent else []
        return StagedBatch(departed, sent, events)

    def _sent_later(self, piece: Unmade) -> Unmade:
        return Unmade(lambda: piece.make() if self.device is None else moved(piece.make(), self.device))

    def copy(self, staged: StagedBatch) -> StagedBatch:
        """Copies tensors of host memory. Runs on the replica's worker, if it has one. Called only if `has_copies`."""
        device = self.device
        assert device is not None
        moved: list[torch.Tensor] = []
        stream = copy_stream(device)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cpu:
                return tensor
            moved.append(_pinned(tensor).to(device, non_blocking=True))
            return moved[-1]

        with stream:  # also makes its device the current one, for which torch pins memory
            parts = [applied_within(piece, copy) for piece in staged.parts]
            events = [stream.record_event()] if moved else []
        return StagedBatch(parts, [*staged.moved, *moved], [*staged.events, *events])

    def receive(self, staged: StagedBatch) -> list[Tree]:
        """Runs on the consumer's thread. See Note [Promises for a copied batch]."""
        if staged.moved:
            stream = torch.accelerator.current_stream(self.device)
            for event in staged.events:
                stream.wait_event(event)
            # `record_stream` is for the memory of dense tensors, so the parts of a sparse or nested one are recorded.
            for tensor in staged.moved:
                for held in memory_of(tensor):
                    held.record_stream(stream)
        return staged.parts


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in pinned memory, from which the device can copy by itself, so that the thread need not wait for it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if 0 in tensor.stride():
        tensor = tensor.contiguous()  # torch keeps the strides in pinned memory, and cannot write where they are 0
    return tensor.pin_memory()  # returns the tensor itself if it is pinned already


class BatchTransfer(NamedTuple):
    """The batch of one step, whose parts are being copied to the replicas' devices."""

    split_batch: SplitBatch
    marks: list[Callable[[], None]]  # they say that the consumer has received it
    staged: list[StagedBatch]

    def received(self, routes: Sequence[Route]) -> Tree:
        """The element, made of the parts on the devices. Runs on the consumer's thread."""
        # See Note [Promises for a copied batch].
        arrived = list(map(Route.receive, routes, self.staged))
        for reach in self.marks:
            reach()
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
    """One epoch over a dataset, read step by step.

    Args:
        steps: The steps that are read.
        routes: The way to each replica.
    """

    def __init__(self, steps: Steps, routes: Sequence[Route]) -> None:
        self._steps: Steps | None = steps  # None when the epoch has ended, or when a thread has them
        self._routes = routes

    @abstractmethod
    def next(self) -> Tree:
        """The element that the replicas get in the next step.

        Raises:
            StopIteration: If there is none.
        """

    def close(self) -> None:
        """Ends the epoch, and the threads and workers that it has started."""
        self._steps = None  # the loader's workers end with its iterator

    def ending(self) -> Callable[[], None]:
        """A function that ends the epoch, and waits until nobody reads the loader. It holds no reference to `self`."""
        close = weakref.WeakMethod(self.close)
        return lambda: (close() or nothing)()


def nothing() -> None:
    """Takes the place of the function that ends an epoch, where there is no epoch to end."""


@final
class OnDemand(Reading):
    """Reads on the caller's thread, when the caller asks for a step. There is no other thread.

    On an accelerator, the copies still overlap with the previous step: its kernels are queued on the current stream,
    and the copies are on a stream of their own.
    """

    def __init__(self, steps: Steps, routes: Sequence[Route]) -> None:
        super().__init__(steps, routes)
        self._are_near = all(route.device is None or route.device.type == "cpu" for route in routes)

    def next(self) -> Tree:
        if self._steps is None:
            raise StopIteration
        if self._are_near and (element := self._steps.next_whole()) is not ABSENT:
            return element
        transfer = transferred(self._steps, self._routes)
        for r, route in enumerate(self._routes):
            if route.has_copies:
                transfer.staged[r] = route.copy(transfer.staged[r])
        return transfer.received(self._routes)


_PATIENCE_S = 5.0  # how long closing waits for a loader that is in the middle of a batch
_LOOK_UP_S = 1.0  # how long the consumer waits before it looks for signals


@final
class _Item:
    """The batch of one step, or an error to raise instead. At the end of the epoch, this error is StopIteration."""

    def __init__(self, transfer: BatchTransfer | None, error: BaseException | None) -> None:
        self.transfer = transfer
        self.error = error  # an error of the reader or, if there is a transfer, of a worker
        self.carried: list[int] = []  # the replicas whose workers have copied their parts

    def forget(self) -> None:
        """Frees the frames of an error that nobody will see. If one of them holds the error, that is a cycle."""
        if self.error is not None:
            self.error.__traceback__ = None


@final
class _PrefetchQueue:
    """The threads, and the queues and flags that they share with the consumer.

    Args:
        workers: The replicas that have a worker.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        self.items: deque[_Item] = deque()  # oldest first
        self.room: SimpleQueue[None] = SimpleQueue()  # an entry for each step that the consumer has received
        self.inboxes: dict[int, SimpleQueue[_Item | None]] = {r: SimpleQueue() for r in workers}
        self.failure: BaseException | None = None  # an error that ended one of the threads
        self.is_closed = False
        self.threads: list[threading.Thread] = []
        self.process = os.getpid()
        self._news: SimpleQueue[None] = SimpleQueue()

    def send(self, item: _Item) -> None:
        """Adds a step to the queue, and gives it to the workers. Runs on the reader."""
        self.items.append(item)
        if self.is_closed:
            item.forget()
        self.tell()
        if item.transfer is not None:
            for inbox in self.inboxes.values():
                inbox.put(item)

    def tell(self) -> None:
        """Tells the consumer that something has changed."""
        if self._news.empty():  # if it is not empty, the consumer will look at the queue anyway
            self._news.put(None)

    def has_arrived(self, item: _Item) -> bool:
        """Whether a step is ready for the consumer: every worker has copied its part."""
        return item.transfer is None or len(item.carried) == len(self.inboxes)

    def wait(self) -> None:
        """Waits until something has changed, but not for long.

        If a signal comes just before the thread begins to wait, Python handles it only after the wait.
        """
        with suppress(Empty):
            self._news.get(timeout=_LOOK_UP_S)

    def end(self, *, waits: bool = False) -> None:
        """Ends the threads. Runs on any thread, also on one of them, if the garbage collector happens to run there."""
        if os.getpid() != self.process:
            return  # the threads do not exist in a forked process
        self.is_closed = True
        self.room.put(None)
        self.send_no_more()
        self.tell()
        items, self.items = self.items, deque()  # a consumer that was interrupted may still use the old deque
        for item in list(items):
            item.forget()
        for thread in self.threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(None if waits else _PATIENCE_S)

    def send_no_more(self) -> None:
        """Tells the workers to end when they have copied what is in their queues."""
        for inbox in self.inboxes.values():
            inbox.put(None)


def _read(steps: Steps, routes: Sequence[Route], queue: _PrefetchQueue, depth: int) -> None:
    """Runs on the reader: reads step after step, until the end of the epoch or until the queue is closed."""
    ahead, most, is_over = 0, depth, False
    while not (is_over or queue.is_closed):
        if ahead >= most:
            queue.room.get()
            ahead -= 1
            continue
        item = _next_item(steps, routes)
        queue.send(item)
        ahead += 1
        most = depth if item.transfer is not None else 1  # after an error: read only when the consumer asks
        is_over = isinstance(item.error, StopIteration)
        del item  # it holds a batch, or an error whose traceback refers to this frame
    queue.send_no_more()


def _next_item(steps: Steps, routes: Sequence[Route]) -> _Item:
    try:
        return _Item(transferred(steps, routes), None)
    except BaseException as error:
        return _Item(None, error)  # not kept in a variable, since the error's traceback refers to this frame


def _work(replica: int, route: Route, queue: _PrefetchQueue) -> None:
    """Runs on a replica's worker: copies the replica's part of step after step."""
    inbox = queue.inboxes[replica]
    while (item := inbox.get()) is not None and not queue.is_closed:
        assert item.transfer is not None
        try:
            item.transfer.staged[replica] = route.copy(item.transfer.staged[replica])
        except BaseException as error:
            item.error = error
        item.carried.append(replica)
        queue.tell()
        del item


def _at_the_callers(device: int, streams: Sequence[torch.Stream], life: Callable[[], None]) -> None:
    """Runs the reader with the caller's current accelerator and streams.

    So a loader that creates tensors on an accelerator uses the same device and stream as on the caller's thread.

    Args:
        device: The index of the caller's current accelerator.
        streams: The caller's current streams.
        life: The function of the reader.
    """
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(device)
    life()


def _live(state: CallerState, device: Device, life: Callable[[], None], queue: _PrefetchQueue) -> None:
    """Runs the function of a reader or a worker, on its new thread, in the state of the caller's thread."""
    try:
        state.run_in(device, life)
    except BaseException as error:
        queue.failure = error
        queue.tell()


@final
class Prefetcher(Reading):
    """Reads ahead on a thread of its own, which is started when the consumer asks for the first step.

    Args:
        steps: The steps that are read.
        routes: The way to each replica.
        depth: How many steps may be read ahead of the consumer.
    """

    def __init__(self, steps: Steps, routes: Sequence[Route], depth: int) -> None:
        super().__init__(steps, routes)
        self._depth = depth
        self._queue = _PrefetchQueue([r for r, route in enumerate(routes) if route.has_copies])
        self._are_going = False
        self._owes_room = False  # whether the last step was an error: the next is read when the consumer asks for it
        weakref.finalize(self, self._queue.end)

    def next(self) -> Tree:
        if os.getpid() != self._queue.process:
            raise RuntimeError(
                "This iterator was made in another process, whose threads read its batches; they are not here. "
                "Iterate over the dataset anew in this process."
            )
        queue = self._queue
        if not self._are_going:
            self._set_going()
        if self._owes_room:
            queue.room.put(None)
            self._owes_room = False
        while not queue.is_closed:
            items = queue.items
            if items and queue.has_arrived(items[0]):
                return self._handed_over(items)
            if queue.failure is not None:
                self.close()
            else:
                queue.wait()
        raise StopIteration if queue.failure is None else queue.failure

    def close(self) -> None:
        super().close()
        self._queue.end()

    def ending(self) -> Callable[[], None]:
        return partial(self._queue.end, waits=True)

    def _handed_over(self, items: deque[_Item]) -> Tree:
        error = items[0].error
        if isinstance(error, StopIteration):
            self.close()
            raise StopIteration
        if error is not None:
            self._owes_room = True
            items.popleft()
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        transfer = items[0].transfer
        assert transfer is not None
        element = transfer.received(self._routes)
        self._queue.room.put(None)
        items.popleft()
        return element

    def _set_going(self) -> None:
        """Starts the threads that are not running: all of them or, if an earlier call was interrupted, the others."""
        if self._steps is not None:
            self._queue.threads = self._hired(self._steps)
            self._steps = None
        for thread in self._queue.threads:
            if thread.ident is None:
                thread.start()
        self._are_going = True

    def _hired(self, steps: Steps) -> list[threading.Thread]:
        queue, routes = self._queue, self._routes
        default = torch.get_default_device()
        here = canonical_device("cpu" if default.type == "meta" else default)
        devices = {r: routes[r].device or here for r in queue.inboxes}
        state = CallerState((here, *devices.values()))

        read = partial(_read, steps, routes, queue, self._depth)
        if devices:
            streams = [torch.accelerator.current_stream(device) for device in local_accelerators()]
            read = partial(_at_the_callers, torch.accelerator.current_device_index(), streams, read)

        def thread(name: str, device: Device, life: Callable[[], None]) -> threading.Thread:
            args = (state, device, life, queue)
            return threading.Thread(target=_live, args=args, name=f"torchstrategy-{name}", daemon=True)

        return [
            thread("reader", here, read),
            *(thread(f"prefetch-{r}", device, partial(_work, r, routes[r], queue)) for r, device in devices.items()),
        ]
