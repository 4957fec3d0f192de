"""The processes that train together, as one of them sees the others.

A worker exchanges with the others where its own replicas stand still, on the thread that called `run`. So all workers
come to the same exchanges in the same order, as all replicas come to the same synchronization points.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from torchstrategy._communication.transfer import grouped
from torchstrategy._core.types import GeneratorLike


class WorkerError(RuntimeError):
    """Another worker failed, is gone, hangs, or went another way. The message names it, and what it raised.

    The strategy cannot be used any more, since its workers do not stand at one place. Start them again from the last
    checkpoint.

    Example:
        >>> issubclass(torchstrategy.WorkerError, RuntimeError)
        True

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/errors/UnavailableError
    """


class Workers:
    """The processes that train together. This class is for a process that trains by itself: it asks nobody.

    A subclass for several processes overrides every method. Every exchange has a name, which is the same in all
    workers. Beside it, the workers compare at which synchronization point they are.

    Args:
        count: How many processes there are.
        index: Which of them this is.

    Attributes:
        is_asked_to_leave: Whether this process will be ended soon. It is told when the next run begins.
        all_leave: Whether this was so in any process when the newest run began.
        differing: What was mentioned and was not alike in all workers. Whoever looks at it takes it out.
    """

    can_overlap = True  # whether `begin_all_reduce` returns before all workers have called it

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count = count
        self.index = index
        self.is_asked_to_leave = False
        self.all_leave = False
        self.differing: set[str] = set()

    def begin_run(self) -> None:
        """Counts a run: workers that are in different runs are told so at their next exchange."""

    def arrive(self, point: str) -> None:
        """Says at which synchronization point the replicas of this worker are, as the user would write it."""

    def compare(self, what: str, value: object) -> None:
        """Notes a value that must be alike in all workers: the next exchange fails if it is not.

        Args:
            what: What to call the value in a message.
            value: Numbers, texts and tensors, or containers of them. Of anything else only the type is compared.
        """

    def mention(self, what: str, value: object) -> None:
        """Notes a value that need not be alike: the next exchange finds out, and adds to `differing` what differs.

        Args:
            what: One of `MENTIONED`.
            value: As for `compare`.
        """

    def all_reduce(self, tensors: Sequence[torch.Tensor], name: str, agreed: bool = False) -> list[torch.Tensor]:
        """The sums of the workers' tensors, tensor by tensor.

        Args:
            tensors: The tensors of this worker.
            name: The name of the exchange.
            agreed: Whether the exchange before this one has shown that all workers come here next, with tensors of the
                same shapes and dtypes.
        """
        return list(tensors)

    def begin_all_reduce(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begins to make a tensor the sum of the workers' tensors, and returns a function that waits for the end.

        No message comes before it: the workers must know that all come to it in the same order, or fail.
        """
        return lambda: None

    def add_up(self, table: torch.Tensor, name: str) -> torch.Tensor:
        """The sum of tables of whole numbers, which are mostly the same in all workers."""
        return table

    def all_gather(self, tensor: torch.Tensor, axis: int, name: str) -> list[torch.Tensor]:
        """The tensors of all workers, in their order. They may differ in the length of `axis`."""
        return [tensor]

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        """The values of all workers, in their order. They are pickled."""
        return [value]

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int, name: str) -> None:
        """Writes the values of the tensors of worker `source` on those of all others."""

    def failed(self, error: BaseException) -> None:
        """Tells the other workers that this one leaves a run by an exception."""

    @final
    def draw_as_first(self, generators: Sequence[GeneratorLike], name: str) -> None:
        """Gives random generators the states that they have in worker 0."""
        states = [generator.get_state() for generator in generators]
        self.broadcast(states, 0, name)
        if self.index:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


LONE = Workers()

BETWEEN_RUNS = "what was written between runs"
IN_RUN = "what a step wrote"
MENTIONED = (BETWEEN_RUNS, IN_RUN)


def digest(data: bytes) -> bytes:
    """Eight bytes by which workers compare what they have."""
    return hashlib.blake2b(data, digest_size=8).digest()


PACK = 4 * 2**20  # bytes from which on tensors that are sent together are enough


def packs_of(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors that are sent together: those of one dtype and device, until they have `PACK` bytes."""
    return grouped([(tensor.dtype, tensor.device) for tensor in tensors], [t.nbytes for t in tensors], PACK, over=True)
