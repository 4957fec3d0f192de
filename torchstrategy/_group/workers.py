"""The processes that train together, as one of them sees the others.

A worker exchanges with the others where its own replicas stand still, on the thread
that called `run`. So all workers come to the same exchanges in the same order, as all
replicas come to the same synchronization points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch

from torchstrategy._base.types import GeneratorLike
from torchstrategy._group.transfer import plan_groups


class WorkerError(RuntimeError):
    """Another worker failed, is gone, hangs, or went another way.

    The message names it, and what it raised.

    You cannot use the strategy any more, since its workers are out of sync. Start them
    again from the last checkpoint.

    Example:
        >>> issubclass(torchstrategy.WorkerError, RuntimeError)
        True

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/errors/UnavailableError
    """


class Workers:
    """The processes that train together.

    This class is for a process that trains by itself: it asks nobody.

    A subclass for several processes overrides every method. Every exchange has a name,
    which is the same in all workers. Beside it, the workers compare at which
    synchronization point they are.

    Args:
        count: How many processes there are.
        index: Which of them this is.

    Attributes:
        is_asked_to_leave: Whether this process will be ended soon. It is told when the
            next run begins.
        all_leave: Whether this was so in any process when the newest run began.
        watches_leaving: Whether somebody asks for `all_leave` after each run, in all
            processes.
        differing: What was mentioned and was not alike in all workers. Whoever looks at
            it takes it out.
        num_exchanges: How many exchanges have begun with a message.
    """

    # Whether `begin_all_reduce` returns before all workers have called it.
    can_overlap = True

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count = count
        self.index = index
        self.is_asked_to_leave = False
        self.all_leave = False
        self.watches_leaving = False
        self.differing: set[str] = set()
        self.num_exchanges = 0

    def begin_run(self) -> None:
        """Counts a run.

        Workers that are in different runs hear so at their next exchange.
        """

    @final
    def begin_step(self) -> None:
        """Says that what this worker raises from here on is an error of the step.

        Before, an error is a refusal of the run.
        """
        self.num_exchanges += 1

    def arrive(self, point: str) -> None:
        """Says at which synchronization point the replicas of this worker are.

        The name is the one that the user would write.
        """

    @final
    def compare(self, what: str, value: object) -> None:
        """Notes a value that must be alike in all workers, or the next exchange fails.

        Args:
            what: What to call the value in a message.
            value: Numbers, texts and tensors, or containers of them. Of anything else
                only the type is compared. A list must not be written later: the same
                list counts as the same value.
        """
        self.compare_all([(what, value)])

    def compare_all(self, pairs: Sequence[tuple[str, object]]) -> None:
        """The same for several values, each with what to call it."""

    def mention(self, what: str, value: object) -> None:
        """Notes a value that need not be alike in all workers.

        The next exchange compares it, and adds its name to `differing` if it differs.

        Args:
            what: One of `MENTIONED`.
            value: As for `compare`.
        """

    def place(self, name: str) -> int:
        """32 bits of where this worker is, for the exchange of this name.

        The bits also depend on the values that have to be alike.

        Whoever sends them and finds them alike in all workers calls `take_compared`.
        """
        return 0

    @property
    def num_compared(self) -> int:
        """How many values the next exchange compares."""
        return 0

    def take_compared(self) -> list[tuple[str, object]]:
        """What the next exchange was to compare, which it does not any more."""
        return []

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], name: str, agreed: bool = False
    ) -> list[torch.Tensor]:
        """The sums of the workers' tensors, tensor by tensor.

        Args:
            tensors: The tensors of this worker.
            name: The name of the exchange.
            agreed: Whether the exchange before this one has shown that all workers come
                here next, with tensors of the same shapes and dtypes.
        """
        return list(tensors)

    def begin_all_reduce(self, flat: torch.Tensor, name: str) -> Callable[[], None]:
        """Begins to make a tensor the sum of the workers' tensors.

        It returns a function that waits for the end.

        No message comes before it: the workers must know that all come to it in the
        same order, or fail.
        """
        return lambda: None

    def all_gather(
        self, tensor: torch.Tensor, axis: int, name: str
    ) -> list[torch.Tensor]:
        """The tensors of all workers, in their order.

        They may differ in the length of `axis`.
        """
        return [tensor]

    def all_gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """The bytes of all workers, in their order."""
        return [data]

    def all_gather_alike(self, data: bytes, name: str) -> list[bytes]:
        """The bytes of all workers, in their order.

        Mostly they are the same, and then only a digest is sent.
        """
        return [data]

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        """The values of all workers, in their order: what `wire` can send.

        Tensors arrive on the CPU.

        Raises:
            TypeError: In all workers, if one of them has a value that cannot be sent.
        """
        return [value]

    def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        source: int,
        name: str,
        are_alike: bool = False,
    ) -> None:
        """Writes the values of the tensors of worker `source` on those of all others.

        Args:
            tensors: The tensors of this worker.
            source: The number of a worker.
            name: The name of the exchange.
            are_alike: Whether all workers have just compared shapes and dtypes, at the
                same exchange. Else they do now.
        """

    def refuse(self, error: Exception, name: str) -> None:
        """Comes to an exchange without what the others wait for there.

        The others raise an error, too, and all can go on.

        Args:
            error: Why. The caller raises it.
            name: The name of the exchange.
        """

    def tell_failure(self, error: BaseException) -> None:
        """Tells the other workers that this one leaves by an exception.

        It tells nothing if they have the exception, too.
        """

    def explain_lost_worker(self, error: RuntimeError) -> RuntimeError:
        """The error that names a lost worker, if an operation failed because of it.

        Somebody else has begun the operation.

        Else the error itself.
        """
        return error

    @final
    def note_of_all(self, error: BaseException) -> None:
        """Notes that all workers raise this error at this exchange.

        So they can go on together.
        """
        _note(error, _OF_ALL, self.num_exchanges)

    @final
    def is_of_all(self, error: BaseException) -> bool:
        """Whether all workers raised this error at the newest exchange."""
        return getattr(error, _OF_ALL, None) == self.num_exchanges

    @final
    @contextmanager
    def exchanging(self, name: str, is_run: bool = False) -> Iterator[None]:
        """A block in which this worker comes to exchanges with the others.

        If the block fails, the others hear why.

        What it refuses before an exchange is refused by all of them, and they go on
        together. In a run, this is what stands in a block of `refusing`, and all that
        is refused before the first exchange.

        Args:
            name: What the user calls in the block.
            is_run: Whether it is a run, in which the user's code may raise anything.
        """
        before = self.num_exchanges
        try:
            yield
        except BaseException as error:
            self.tell_why(error, name, not is_run or self.num_exchanges == before)
            raise

    @final
    def tell_why(self, error: BaseException, name: str, is_early: bool) -> None:
        """Tells the others why this worker does not come to an exchange, or leaves.

        Args:
            error: What it raises.
            name: What the user has called.
            is_early: Whether no exchange has begun in this call that this worker could
                have left halfway.
        """
        if isinstance(error, (TypeError, ValueError)) and (
            is_early or is_refusal(error)
        ):
            self.refuse(error, name)
        self.tell_failure(error)

    @final
    def draw_as_first(self, generators: Sequence[GeneratorLike], name: str) -> None:
        """Gives random generators the states that they have in worker 0."""
        states = [generator.get_state() for generator in generators]
        self.broadcast(states, 0, name)
        if self.index:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


LONE = Workers()


@contextmanager
def refusing() -> Iterator[None]:
    """A block of a step that checks what a replica brings to the next exchange."""
    try:
        yield
    except (TypeError, ValueError) as error:
        _note(error, _REFUSAL, True)
        raise


def is_refusal(error: BaseException) -> bool:
    """Whether an error comes from a block of `refusing`."""
    return getattr(error, _REFUSAL, None) is True


def _note(error: BaseException, mark: str, value: object) -> None:
    # A class of the user's may have no room for it.
    with suppress(AttributeError, TypeError):
        setattr(error, mark, value)


_REFUSAL, _OF_ALL = "_torchstrategy_refusal", "_torchstrategy_of_all"

BETWEEN_RUNS = "what was written between runs"
IN_RUN = "the buffers that a step wrote"
ROWS = "the rows of a batch"
STREAMS = "the random generators"
MENTIONED = (BETWEEN_RUNS, IN_RUN, ROWS, STREAMS)


PACK = 4 * 2**20  # bytes from which on tensors that are sent together are enough


def packs_of(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors that are sent together, until they have `PACK` bytes.

    Tensors of one dtype and device go together.
    """
    return plan_groups(
        [(tensor.dtype, tensor.device) for tensor in tensors],
        [t.nbytes for t in tensors],
        PACK,
        over=True,
    )
