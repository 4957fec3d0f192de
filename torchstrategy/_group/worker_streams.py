"""The caller's random generators, which all workers keep in one state.

This is the state of worker 0's generators.
"""

from __future__ import annotations

from typing import final

import torch

from torchstrategy._base.marks import checksum
from torchstrategy._base.types import Device
from torchstrategy._group.random_streams import generators_of
from torchstrategy._group.workers import STREAMS, Workers


# Note [Random streams of workers]
# Worker w of R replicas has the replicas w * R to w * R + R - 1 of all, and each draws
# from the stream of its number: see Note [Random streams of replicas]. All streams are
# made of the state of the caller's generators. Where these differ, worker 0 sends its
# own. They are compared when a run begins, wherever gradients are reduced, and when the
# run ends. So what the caller draws, what an update draws, and what the next run draws
# is the same in all workers. If a replica of another worker has drawn and replica 0 has
# not, the caller's generator moves on by one number, as with replicas in one process. A
# worker with one replica does without these messages: see Note [Random streams of lone
# replicas].
@final
class WorkerStreams:
    """The caller's random generators in one worker.

    Only the thread that called `run` uses it.

    Args:
        workers: The processes that train together.
        device: The device of the first replica of this worker.
    """

    def __init__(self, workers: Workers, device: Device) -> None:
        self._workers = workers
        self._device = device
        self._begun = 0
        # Whether a replica other than replica 0 of all has drawn in this run.
        self.has_drawn = False

    def begin(self) -> None:
        """A run begins, with an exchange after which `settle` is called."""
        self._begun, self.has_drawn = self._mark(), False
        self.mention()

    def mention(self) -> None:
        """Lets the next exchange compare the generators. `settle` comes after it."""
        self._workers.mention(STREAMS, (self._mark(), self.has_drawn))

    def settle(self) -> None:
        """Gives the generators the state of worker 0's, if a difference was found."""
        if STREAMS in self._workers.differing:
            self._workers.differing.discard(STREAMS)
            self._follow()
        self.has_drawn = False

    def _follow(self) -> None:
        generators = generators_of(self._device, with_cpu=True)
        leads = self._workers.index == 0
        states = [generator.get_state() for generator in generators] if leads else []
        told = states, self.has_drawn, leads and self._mark() == self._begun
        of_all = self._workers.all_gather_object(told, "the random numbers of worker 0")
        states, _, is_as_begun = of_all[0]
        if not leads:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        if is_as_begun and any(has_drawn for _, has_drawn, _ in of_all):
            torch.empty((), dtype=torch.int64, device="cpu").random_(
                generator=torch.default_generator
            )

    def _mark(self) -> int:
        """A number by which workers compare the states of their generators."""
        number = 0
        for generator in generators_of(self._device, with_cpu=True):
            number = checksum(generator.get_state(), before=number)
        return number
