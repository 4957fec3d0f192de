"""The random numbers that the only replica of a worker draws."""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import final

import torch

from torchstrategy._base.context import is_accelerator
from torchstrategy._base.errors import plural
from torchstrategy._base.memory import memory_at
from torchstrategy._base.types import Device, GeneratorLike
from torchstrategy._group.random_streams import generators_of
from torchstrategy._group.workers import Workers


# Note [Random streams of lone replicas]
# All workers have the caller's generators in the same state when a run begins. Worker 0
# draws from them, and each other worker from a stream whose seed is made of this state
# and of the number of the worker: so a dropout mask is drawn once only. In the first
# run after a seed was set these are the streams of as many replicas in one process, see
# Note [Random streams of replicas].
# Workers that compute one model together, as with tensor parallelism, draw the numbers
# of the first of them. What acts for all workers, as a merge function or an optimizer
# that adds noise does, draws the same numbers in all of them: from one more stream that
# is made of the state.
# When the run is over, all workers need the same state again, and none knows what
# another one has drawn. So a worker that has drawn gives its generators a state that is
# made of the one from before the run. If only some workers have drawn, or a loader has
# drawn other numbers between runs, the states differ. The next exchange shows it, and
# at the end of its run all workers take the state of worker 0. Where only some steps
# have drawn, a warning says so.
@final
class OwnRandom:
    """The caller's random generators in one worker.

    Only the thread that called `run` uses it.

    Args:
        workers: The processes that train together.
        device: The device of the replica.
    """

    def __init__(self, workers: Workers, device: Device) -> None:
        self._workers = workers
        self._device = device
        self._has_accelerator = is_accelerator(device)
        self._stream = workers.index  # the worker whose random numbers this one draws
        self._begun = _States([])  # when the run began
        self._digest = b""  # of these states
        self._first = _States([])  # with which the replica's stream begins
        self._generators = self.generators()  # those of the newest run
        # The states at which the stream for all workers was left.
        self._shared: _States | None = None
        self.mark = 0  # a number by which workers compare the states
        # In how many runs the replica has drawn since the workers last compared.
        self._num_drawn = 0

    def draw_from(self, stream: int) -> None:
        """Makes the replica draw the random numbers of a worker from the next run on.

        That worker computes the same as this one.
        """
        self._stream, self._begun = stream, _States([])

    def follow_first(self) -> None:
        """Gives the generators the states that those of worker 0 have."""
        self._workers.draw_as_first(self.generators(), "the random numbers of worker 0")

    def compare(self, name: str) -> bool:
        """Whether the workers began this run in other states.

        Called in all workers, for the exchange of this name.
        """
        of_all = self._workers.all_gather_object((self.mark, self._num_drawn), name)
        self._num_drawn = 0
        marks, counts = zip(*of_all, strict=True)
        if len(set(marks)) > 1 and len(set(counts)) > 1:
            told = ", ".join(
                f"worker {w} in {plural(count, 'run')}"
                for w, count in enumerate(counts)
            )
            warnings.warn(_DREW.format(told), UserWarning, stacklevel=2)
        return len(set(marks)) > 1

    @contextmanager
    def for_all_workers(self) -> Iterator[None]:
        """A block of a run whose random numbers are the same in all workers."""
        own = _States(self._generators)
        if self._shared is not None:
            self._set(self._shared)
        else:
            self._seed("for all")
        begun = _States(self._generators)
        try:
            yield
        finally:
            left = _States(self._generators)
            if left.bits != begun.bits:
                self._shared = left
            self._set(own)

    def begin_run(self) -> None:
        """From here on, the replica draws from its stream."""
        if self._has_accelerator:  # which has no generator before it is first used
            self._generators = self.generators()
        states = _States(self._generators)
        self._shared = None
        if states.bits != self._begun.bits:
            self._begun, self._first = states, states
            # As in Note [Random streams of replicas]: four bytes stand for the depth of
            # nested runs.
            self._digest = hashlib.blake2b(b"".join([bytes(4), *states.bits])).digest()
            self.mark = zlib.crc32(self._digest)
            if self._stream:
                self._seed(self._stream)
                self._first = _States(self._generators)
        elif self._stream:
            self._set(self._first)

    def end_run(self) -> None:
        """Gives the generators the state for the next run, when this one has drawn."""
        has_drawn = (
            _States(self._generators).bits != self._first.bits
            or self._shared is not None
        )
        if has_drawn:
            self._seed("next")
            self._num_drawn += 1
        elif self._stream:
            self._set(self._begun)

    def _seed(self, stream: int | str) -> None:
        """Lets generators begin a stream made of their states at the run's begin."""
        salt = (
            stream.to_bytes(8, "little") if isinstance(stream, int) else stream.encode()
        )
        digest = hashlib.blake2b(self._digest, digest_size=8, salt=salt).digest()
        for generator in self._generators:
            # A seed is a signed 64-bit number.
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def generators(self) -> Sequence[GeneratorLike]:
        """The random generators from which the replica draws."""
        return generators_of(self._device, with_cpu=True)

    def _set(self, states: _States) -> None:
        for generator, state in zip(self._generators, states.tensors, strict=True):
            generator.set_state(state)


class _States:
    """The states of some generators, which are in the memory of the CPU."""

    __slots__ = ("bits", "tensors")

    def __init__(self, generators: Sequence[GeneratorLike]) -> None:
        self.tensors = list(map(_GET_STATE, generators))
        # `torch.equal` takes several times as long as it takes to compare bytes.
        self.bits = [
            memory_at(state.data_ptr(), state.nbytes).raw for state in self.tensors
        ]


_GET_STATE: Callable[[GeneratorLike], torch.Tensor] = methodcaller("get_state")


_DREW = (
    "The step has not drawn random numbers in the same runs in all workers: since they "
    "last compared, {}. From the end of this run on, all workers have the random state "
    "of worker 0. Let all of them draw, or none: a worker that needs no numbers draws "
    "them all the same."
)
