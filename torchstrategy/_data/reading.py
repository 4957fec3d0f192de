"""How the replicas' parts of a batch come to their devices, and when.

They come as the caller asks for a step, or ahead of that.

Three kinds of threads may work on a replica's part; without prefetching, all three are
the caller's thread:

    reading thread     `stage`    moves tensors that are on an accelerator already: its
                                  current stream has made them
    replica's copier   `copy`     pins tensors in host memory and copies them, on the
                                  copy stream of the device
    consumer's thread  `receive`  makes its current stream wait for both, and keeps
                                  their memory until it is used

A copier is a thread. It is neither a worker of the loader, which is a process that
reads samples, nor one of the workers that train together.

Ahead, batches are read, split, pinned and copied:

    reader                     a copier for each replica       the consumer
                               on an accelerator
    waits for room
    reads and splits a batch,
    stages its parts --------> copies its parts -------------> waits for the oldest step
    ^                                                          receives its parts
    +--------------------------- room for one more ------------+

The threads share a `Prefetcher` with the iterator that they work for, which they do not
keep alive. When it is dropped, the `Prefetcher` is closed, and they end. They use only
queues to talk to each other, since a finalizer may use a queue at any point of the
program; with a lock, it could wait for ever. A step stays in the queue until the
consumer has received it, so that Ctrl-C loses no step: see Note [What happens on
Ctrl-C] in `_group/replica_threads`.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, final

import torch

from torchstrategy._base.context import CallerState, is_accelerator
from torchstrategy._base.devices import (
    canonical_device,
    copies_by_itself,
    local_accelerators,
    memory_device,
)
from torchstrategy._base.distributed_values import ABSENT, PerReplica, Unmade
from torchstrategy._base.streams import (
    current_streams,
    keep_until_used,
    make_current,
    on_stream,
)
from torchstrategy._base.trace import traced
from torchstrategy._base.tree import map_leaves, tree_flatten
from torchstrategy._base.types import Device, Tree
from torchstrategy._data.batch_types import Rows, apply_within, exchange_lists, move_to
from torchstrategy._data.steps import SplitBatch, Splitter, are_in_host_memory
from torchstrategy._group.copy_streams import Cargo, copy_stream
from torchstrategy._group.workers import refusing


class StagedBatch(NamedTuple):
    """The part of a batch for one replica, which is being copied or has been copied."""

    parts: list[Tree]
    moved: list[torch.Tensor]  # the tensors that the consumer's stream has to wait for
    events: list[torch.Event]  # they happen when these tensors are on the device


# Note [Promises for a copied batch]
# A batch is copied to an accelerator on other streams than the consumer's, so the
# consumer is given two promises:
# 1. Its stream reads a tensor only when the copy is complete. `stage` and `copy` record
#    an event after their copies, and `receive` makes the consumer's current stream wait
#    for it. The consumer's thread does not wait.
# 2. The memory of a tensor is kept until its stream has used it. The copies of `copy`
#    are allocated on the copy stream, those of `stage` on the current stream of the
#    reading thread. When the consumer drops one, the allocator would give its memory to
#    the next copy at once, though kernels that read it may still be queued on the
#    consumer's stream. `record_stream` makes the allocator wait for these.
# Without prefetching, the consumer's thread is the reading thread, so that for the
# tensors of `stage` both streams are one, and both promises are kept anyway.
# Both are given in `receive`, since only the consumer's thread knows on which stream
# the batch will be used.
@final
class Route:
    """The way to the device of one replica.

    Args:
        device: The device to which tensors are copied. None: they stay where they are.
    """

    def __init__(self, device: Device | None) -> None:
        self.device = None if device is None else memory_device(device)
        # Whether a copier could copy ahead.
        self.has_copies = device is not None and is_accelerator(device)

    def stage(self, parts: Sequence[Tree]) -> StagedBatch:
        """Moves tensors that are on an accelerator.

        Runs on the reading thread, on its current streams.
        """
        stream = (
            torch.accelerator.current_stream(self.device) if self.has_copies else None
        )
        return self._send(parts, stream, are_in_host_memory=False)

    def copy(self, staged: StagedBatch) -> StagedBatch:
        """Copies tensors of host memory. Runs on the replica's copier, if it has one.

        Called only if `has_copies`.
        """
        assert self.device is not None
        stream = copy_stream(self.device, Cargo.BATCHES)
        # This also makes the stream's device the current one, for which torch pins
        # memory.
        with on_stream(stream):
            parts, moved, events = self._send(
                staged.parts, stream, are_in_host_memory=True
            )
        return StagedBatch(parts, [*staged.moved, *moved], [*staged.events, *events])

    def _send(
        self,
        parts: Sequence[Tree],
        stream: torch.Stream | None,
        *,
        are_in_host_memory: bool,
    ) -> StagedBatch:
        """The parts, with their tensors on the device; `stream` copies the tensors.

        Either the tensors in host memory are copied, or all others.
        """
        moved: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if self.device is None or tensor.is_cpu is not are_in_host_memory:
                return tensor
            # MPS has one stream, so nobody has to wait.
            if stream is None or not copies_by_itself(self.device):
                return tensor.to(self.device)
            moved.append(
                (_pin(tensor) if are_in_host_memory else tensor).to(
                    self.device, non_blocking=True
                )
            )
            return moved[-1]

        sent = [
            self._send_later(part) if type(part) is Unmade else apply_within(part, move)
            for part in parts
        ]
        events = [stream.record_event()] if moved and stream is not None else []
        return StagedBatch(sent, moved, events)

    def _send_later(self, piece: Unmade) -> Unmade:
        def make() -> Tree:
            made = piece.make()
            return made if self.device is None else move_to(made, self.device)

        return Unmade(make)

    def receive(self, staged: StagedBatch) -> list[Tree]:
        """Runs on the consumer's thread. See Note [Promises for a copied batch]."""
        if staged.moved:
            stream = torch.accelerator.current_stream(self.device)
            for event in staged.events:
                stream.wait_event(event)
            for tensor in staged.moved:
                keep_until_used(tensor, stream)
        return staged.parts


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in pinned memory, from which the device can copy by itself.

    So the thread need not wait for the copy.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if 0 in tensor.stride():
        # torch keeps the strides in pinned memory, and cannot write where they are 0.
        tensor = tensor.contiguous()
    return tensor.pin_memory()  # returns the tensor itself if it is pinned already


@final
@dataclass(eq=False)
class Transfer:
    """The batch of one step, while its parts are copied to the replicas' devices.

    It may also be an error to raise in place of the batch.

    Attributes:
        batch: The batch. None: an error of the reader takes its place; at the end of
            the epoch, this is StopIteration.
        marks: The functions that say that the consumer has received it.
        staged: The part of each replica.
        error: The error of the reader or, if there is a batch, of a copier.
        carried: The replicas whose copiers have copied their parts.
    """

    batch: SplitBatch | None = None
    marks: Sequence[Callable[[], None]] = ()
    staged: list[StagedBatch] = field(default_factory=list)
    error: BaseException | None = None
    carried: list[int] = field(default_factory=list)

    def receive(self, routes: Sequence[Route]) -> Tree:
        """The element, made of the parts on the devices.

        Runs on the consumer's thread.
        """
        # See Note [Promises for a copied batch].
        arrived = list(map(Route.receive, routes, self.staged))
        for reach in self.marks:
            reach()
        assert self.batch is not None
        return self.batch.assemble(arrived)

    def forget(self) -> None:
        """Frees the frames of an error that nobody will see.

        If one of them holds the error, that is a cycle.
        """
        if self.error is not None:
            self.error.__traceback__ = None


class Reading(ABC):
    """One epoch over a dataset, read step by step on one thread at a time.

    After an error it goes on if the loader can.

    The loader is read in host memory, whatever the default device is: in a strategy's
    scope, this is the device of the parameters.

    Args:
        splitter: Splits the elements of a step.
        routes: The way to each replica.
    """

    _is_ahead = False  # whether steps are read before the consumer asks for them

    def __init__(self, splitter: Splitter, routes: Sequence[Route]) -> None:
        self.splitter = splitter
        self.routes = routes
        # Replicas whose parts are copied.
        self._receivers = [r for r, route in enumerate(routes) if route.has_copies]
        # The elements of the next step, if an error came after they were read.
        self._elements: list[Tree] = []
        followed = None if splitter.reads_its_own else splitter.workers
        # An epoch over each source; none when nothing more is read. The caller's thread
        # draws their seeds.
        self._passes = [source.begin(followed) for source in splitter.sources]
        for reach in self._marks():
            reach()

    @abstractmethod
    def next(self) -> Tree:
        """The element that the replicas get in the next step.

        Raises:
            StopIteration: If there is none.
        """

    @abstractmethod
    def close(self, *, waits: bool = False) -> None:
        """Ends the epoch, and the threads and loader workers that it has started.

        Args:
            waits: Whether to wait until nobody reads the loader, however long that
                takes.
        """

    def _begin_transfer(self) -> Transfer:
        """Reads the batch of the next step and stages its parts.

        Runs on the reading thread.

        If the data runs out in the middle of a step, the remaining replicas get
        `ABSENT`, and no element is lost.

        Raises:
            StopIteration: If there is none.
        """
        splitter, passes = self.splitter, self._passes
        with traced("split a batch"):
            with splitter.sources[0].reading():
                for r in range(len(self._elements), splitter.elements_of_step):
                    try:
                        self._elements.append(next(passes[r % len(passes)]))
                    except StopIteration:
                        self._elements.append(ABSENT)
                elements, self._elements = self._elements, []
                if all(element is ABSENT for element in elements):
                    raise StopIteration
                with refusing():  # the others have come as far with theirs
                    batch = splitter.split_batch(elements)
                if splitter.is_to_be_seen:
                    splitter.see(batch)
                marks = self._marks()
            return Transfer(
                batch, marks, list(map(Route.stage, self.routes, batch.parts()))
            )

    def _marks(self) -> list[Callable[[], None]]:
        """Functions that say, for each epoch, that the consumer received what was read.

        They speak of all that was read until now.
        """
        marks: list[Callable[[], None]] = []
        for one in self._passes:
            # Where nothing is read ahead, the loader is asked for its state when
            # somebody saves it.
            state = one.source.state_of_loader() if self._is_ahead else None
            marks.append(partial(one.position.reach, one.count, state))
        return marks


@final
class OnDemand(Reading):
    """Reads on the caller's thread, when the caller asks for a step.

    There is no other thread.

    On an accelerator, the copies still overlap with the previous step: its kernels are
    queued on the current stream, and the copies are on a stream of their own.
    """

    def __init__(self, splitter: Splitter, routes: Sequence[Route]) -> None:
        super().__init__(splitter, routes)
        are_near = all(
            route.device is None or route.device.type == "cpu" for route in routes
        )
        # Whether an element can be given as it is.
        self._are_whole = splitter.is_alone and are_near

    def next(self) -> Tree:
        if not self._passes:
            raise StopIteration
        if self._are_whole and not (self.splitter.is_to_be_seen or self._elements):
            (epoch,) = self._passes
            with epoch.source.reading():
                self._elements.append(next(epoch))
            # If not, `_begin_transfer` goes on with it.
            if are_in_host_memory(self._elements[0]):
                epoch.position.reach(epoch.count, None)
                return self._elements.pop()
        transfer = self._begin_transfer()
        for r in self._receivers:
            transfer.staged[r] = self.routes[r].copy(transfer.staged[r])
        return transfer.receive(self.routes)

    def close(self, *, waits: bool = False) -> None:
        self._passes = []  # the loader's workers end with its iterator


def next_of_all_workers(reading: Reading) -> Callable[[], Tree]:
    """The `next` of an epoch in which each worker reads a dataset of its own.

    It ends where the last of them ends.

    A worker whose data has run out before that of others gets its last batch again, as
    that of an understudy: it takes part in the steps, and its rows do not count. If
    there was none, it gets a batch of another worker. See Note [Why a worker without
    rows runs the step] in `_group/participants`.
    """
    workers, splitter = reading.splitter.workers, reading.splitter
    device = reading.routes[0].device or torch.device("cpu")
    last: list[Tree] = []  # the last batch, once there was one

    def next_of_all() -> Tree:
        try:
            last[:] = [reading.next()]
            has_next = True
        except StopIteration:
            has_next = False
        of_all = workers.all_gather_bytes(
            bytes([has_next, bool(last)]), "the next batch of a dataset"
        )
        if not any(has_theirs for has_theirs, _ in of_all):
            raise StopIteration
        if not all(had_one for _, had_one in of_all):
            lender = next(w for w, (has_theirs, _) in enumerate(of_all) if has_theirs)
            mine = _lend(last[0]) if workers.index == lender else None
            borrowed = workers.all_gather_object(mine, "the first batch of a dataset")[
                lender
            ]
            if not last:
                last.append(_borrow(borrowed, splitter.replicas, device))
        return last[0] if has_next else map_leaves(_as_understudy, last[0])

    return next_of_all


def _lend(batch: Tree) -> Tree:
    """A batch in the form in which it can be sent.

    It has the structure, the leaves as one replica has them, and which of these were
    split.
    """
    leaves, spec = tree_flatten(batch)
    are_split = [isinstance(leaf, PerReplica) for leaf in leaves]
    of_one = [
        leaf.values[0] if isinstance(leaf, PerReplica) else leaf for leaf in leaves
    ]
    # Each leaf is replaced by its position.
    structure = spec.unflatten(range(len(leaves)))
    return structure, [exchange_lists(leaf, Rows, list) for leaf in of_one], are_split


def _borrow(borrowed: Tree, replicas: int, device: Device) -> Tree:
    """The batch of which `_lend` made these parts, on `device`.

    In this batch, all replicas have what one replica had.
    """
    structure, leaves, are_split = borrowed

    def make(index: int) -> Tree:
        if not are_split[index]:
            return leaves[index]
        return PerReplica([move_to(leaves[index], device)] * replicas)

    return map_leaves(make, structure)


def _as_understudy(leaf: Tree) -> Tree:
    """A leaf for the first replica, where no replica of this worker has rows."""
    if not isinstance(leaf, PerReplica):
        return leaf
    count = len(leaf._components)
    return PerReplica([ABSENT] * count, (0,) * count, understudy=leaf._in_replica(0))


# How long closing waits for a loader that is in the middle of a batch.
_PATIENCE_S = 5.0
_LOOK_UP_S = 1.0  # how long the consumer waits before it looks for signals


@final
class Prefetcher(Reading):
    """Reads ahead on a thread of its own.

    The thread starts when the consumer asks for the first step.

    Args:
        splitter: Splits the elements of a step.
        routes: The way to each replica.
        depth: How many steps may be read ahead of the consumer.
    """

    _is_ahead = True

    def __init__(self, splitter: Splitter, routes: Sequence[Route], depth: int) -> None:
        super().__init__(splitter, routes)
        self._depth = depth
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        self._are_going = False
        self._is_closed = False
        # An error that ended one of the threads.
        self._failure: BaseException | None = None
        self._items: deque[Transfer] = deque()  # oldest first
        # An entry for each step that the consumer has received.
        self._room: SimpleQueue[None] = SimpleQueue()
        # Whether the last step was an error: the next is read when the consumer asks
        # for it.
        self._owes_room = False
        # An entry for the consumer, if something has changed.
        self._news: SimpleQueue[None] = SimpleQueue()
        self._inboxes: dict[int, SimpleQueue[Transfer | None]] = {
            r: SimpleQueue() for r in self._receivers
        }

    # On the consumer's thread

    def next(self) -> Tree:
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator was made in another process, where its threads are. "
                "Iterate over the dataset anew."
            )
        if not self._are_going:
            self._set_going()
        if self._owes_room:
            self._room.put(None)
            self._owes_room = False
        while not self._is_closed:
            items = self._items
            if items and (
                items[0].batch is None or len(items[0].carried) == len(self._inboxes)
            ):
                return self._hand_over(items)
            if self._failure is not None:
                self.close()
            else:  # not for long: see Note [What happens on Ctrl-C]
                with suppress(Empty):
                    self._news.get(timeout=_LOOK_UP_S)
        raise StopIteration if self._failure is None else self._failure

    def _hand_over(self, items: deque[Transfer]) -> Tree:
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
        element = items[0].receive(self.routes)
        self._room.put(None)
        items.popleft()
        return element

    def _set_going(self) -> None:
        """Starts the threads that are not running.

        These are all threads, or the others if an earlier call was interrupted.
        """
        if not self._threads and not self._is_closed:
            self._threads = self._make_threads()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        self._are_going = True

    def _make_threads(self) -> list[threading.Thread]:
        default = torch.get_default_device()
        here = canonical_device("cpu" if default.type == "meta" else default)
        devices = {r: self.routes[r].device or here for r in self._inboxes}
        state = CallerState(current_streams((here, *devices.values())))
        index = torch.accelerator.current_device_index() if devices else None
        streams = (
            [
                torch.accelerator.current_stream(device)
                for device in local_accelerators()
            ]
            if devices
            else []
        )

        def thread(
            name: str, device: Device, life: Callable[[], None]
        ) -> threading.Thread:
            args = (state, device, life)
            return threading.Thread(
                target=self._live, args=args, name=f"torchstrategy-{name}", daemon=True
            )

        return [
            thread("reader", here, partial(self._read_ahead, index, streams)),
            *(
                thread(f"prefetch-{r}", device, partial(self._copy_ahead, r))
                for r, device in devices.items()
            ),
        ]

    def close(self, *, waits: bool = False) -> None:
        # Runs on any thread, also on one of those that it ends, if the garbage
        # collector happens to run there.
        if os.getpid() != self._process:
            return  # the threads do not exist in a forked process
        self._is_closed = True
        self._room.put(None)
        self._send_no_more()
        self._tell()
        # A consumer that was interrupted may still use the old deque.
        items, self._items = self._items, deque()
        for item in list(items):
            item.forget()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(None if waits else _PATIENCE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._passes = []

    # On the threads of the reader and the copiers

    def _live(
        self, state: CallerState, device: Device, life: Callable[[], None]
    ) -> None:
        """Runs the function of a reader or copier on its new thread.

        The function runs in the state of the caller's thread.
        """
        try:
            state.run_on_other_thread(device, life)
        except BaseException as error:
            self._failure = error
            self._tell()

    def _read_ahead(self, device: int | None, streams: Sequence[torch.Stream]) -> None:
        """Reads step after step, until the epoch ends or the queue is closed.

        It does so with the caller's current accelerator and streams, so that a loader
        that creates tensors on an accelerator uses the same device and stream as on the
        caller's thread.
        """
        if streams:
            make_current(streams)
        if device is not None:
            torch.accelerator.set_device_index(device)
        ahead, most, is_over = 0, self._depth, False
        while not (is_over or self._is_closed):
            if ahead >= most:
                self._room.get()
                ahead -= 1
                continue
            item = self._next_item()
            self._items.append(item)
            if self._is_closed:
                item.forget()
            self._tell()
            if item.batch is not None:
                for inbox in self._inboxes.values():
                    inbox.put(item)
            ahead += 1
            # After an error: read only when the consumer asks.
            most = self._depth if item.batch is not None else 1
            is_over = isinstance(item.error, StopIteration)
            # It holds a batch, or an error whose traceback refers to this frame.
            del item
        self._passes = []
        self._send_no_more()

    def _next_item(self) -> Transfer:
        try:
            return self._begin_transfer()
        except BaseException as error:
            # The transfer is not kept in a variable, since the error's traceback refers
            # to this frame.
            return Transfer(error=error)

    def _send_no_more(self) -> None:
        """Tells the copiers to end when they have copied what is in their queues."""
        for inbox in self._inboxes.values():
            inbox.put(None)

    def _copy_ahead(self, replica: int) -> None:
        """Runs on a replica's copier: copies the replica's part of step after step."""
        inbox, route = self._inboxes[replica], self.routes[replica]
        while (item := inbox.get()) is not None and not self._is_closed:
            try:
                item.staged[replica] = route.copy(item.staged[replica])
            except BaseException as error:
                item.error = error
            item.carried.append(replica)
            self._tell()
            del item

    def _tell(self) -> None:
        """Tells the consumer that something has changed."""
        # If it is not empty, the consumer will look at the queue anyway.
        if self._news.empty():
            self._news.put(None)
