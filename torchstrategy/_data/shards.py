"""The rows of a global batch that one worker loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

from torch.utils.data import Sampler

from torchstrategy._base.types import Tree
from torchstrategy._data.same_rows import Read


@final
class Shard(NamedTuple):
    """What one worker has loaded of a global batch."""

    element: Tree
    read: Read  # the indices of the global batch


@final
class ShardedBatches(Sampler[list[Any]]):
    """The indices that one worker loads of the batches of a batch sampler.

    All workers draw the same indices in the same order, and each loads the rows of its
    own replicas only. So no row is loaded twice, and the rows of a replica are those
    that it would get if all replicas were in one process.

    Args:
        sampler: The batch sampler of the user's loader, with the global batch size.
        loaded_of: Returns which rows this worker loads of a number of rows.

    Attributes:
        drawn: The batches of the newest iteration that were drawn and not read.
    """

    def __init__(
        self, sampler: Iterable[Sequence[Any]], loaded_of: Callable[[int], slice]
    ) -> None:
        self.sampler, self._loaded_of = sampler, loaded_of
        self.drawn: deque[Read] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.drawn = deque()
        return self._parts_of(self.drawn)

    def __len__(self) -> int:
        # Torch's samplers have a length, and others may.
        return len(self.sampler)  # type: ignore[arg-type]

    def _parts_of(self, drawn: deque[Read]) -> Iterator[list[Any]]:
        for number, batch in enumerate(self.sampler):
            indices = list(batch)
            drawn.append(Read(number, indices, has_indices=True))
            yield indices[self._loaded_of(len(indices))]
