"""The caller's random generators, which all workers keep in the state that those of worker 0 have."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import final

import torch

from torchstrategy._communication.workers import Workers
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.random_streams import RandomStreams, generators_of
from torchstrategy._execution.replica import InlineReplica, Replica


# Note [Random streams of workers]
# Worker w of R replicas has the replicas w * R to w * R + R - 1 of all, and each draws from the stream of its number:
# see Note [Random streams of replicas]. All streams are made of the state of the caller's generators. Where these
# differ, worker 0 sends its own. They are compared when a run begins, wherever gradients are reduced, and when
# the run ends. So what the caller draws, what an update draws, and what the next run draws is the same in all workers.
# If a replica of another worker has drawn and replica 0 has not, the caller's generator moves on by one number, as with
# replicas in one process.
@final
class WorkerStreams:
    """The caller's random generators in one worker. Only the thread that called `run` uses it.

    Args:
        workers: The processes that train together.
        device: The device of the first replica of this worker.
        num_replicas: How many replicas each worker has.
    """

    def __init__(self, workers: Workers, device: Device, num_replicas: int) -> None:
        self.workers = workers
        self._device = device
        self._first = workers.index * num_replicas
        self._begun = 0
        self.has_drawn = False  # whether a replica other than replica 0 of all has drawn in this run

    def begin(self) -> int:
        """A run begins. Returns the mark of this worker's generators."""
        self._begun, self.has_drawn = self.mark(), False
        return self._begun

    def mark(self) -> int:
        """A number of 24 bits by which workers compare the states of their generators."""
        number = 0
        for generator in generators_of(self._device, with_cpu=True):
            number = zlib.crc32(generator.get_state().numpy().tobytes(), number)
        return number >> 8

    def follow(self, has_drawn: bool = False) -> None:
        """Gives the generators the state that those of worker 0 have.

        Args:
            has_drawn: Whether a replica of another worker than worker 0 has drawn.
        """
        generators = generators_of(self._device, with_cpu=True)
        if has_drawn and self.workers.index == 0 and self.mark() == self._begun:
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
        self.workers.draw_as_first(generators, "the random numbers of worker 0")

    def around(self, call: Callable[[Replica], Tree]) -> Callable[[Replica], Tree]:
        """The same function, in which a single replica that is not replica 0 of all has a stream of its own.

        The workers compare at which synchronization points their replicas are.
        """

        def drawing(replica: Replica) -> Tree:
            replica.telling = self.workers.arrive
            with self._drawing(replica) if self._first and isinstance(replica, InlineReplica) else nullcontext():
                return call(replica)

        return drawing

    @contextmanager
    def _drawing(self, replica: InlineReplica) -> Iterator[None]:
        streams = RandomStreams([self._device], one_at_a_time=True, first=self._first)

        @contextmanager
        def combining() -> Iterator[None]:
            streams.put_callers_in_force()
            try:
                yield
            finally:
                streams.put_in_force(0)

        replica.combining = combining
        streams.put_in_force(0)
        try:
            yield
        finally:
            self.has_drawn = streams.give_back()
