"""The rows that one worker loads of each global batch, where the replicas are in several processes.

All workers draw the same indices in the same order, and each loads the rows of its own replicas only. So no row is
loaded twice, and the rows of a replica are those that it would get if all replicas were in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from torchstrategy._core.types import Tree

# Cuts a number of rows into a part for each replica of all workers.
Cut = Callable[[int], list[slice]]


@final
class Shard(NamedTuple):
    """What one worker has loaded of a global batch."""

    element: Tree
    total: int  # how many rows the global batch has


class Share(NamedTuple):
    """Which rows of a global batch belong to the replicas of one worker.

    Attributes:
        slices: For each replica of this worker, its rows.
        borrowed: The rows on which a worker without rows runs the step, which are those of replica 0 of all; see
            `ReplicaWeights.is_understudy`. None: this worker has rows, or there are none.
    """

    slices: list[slice]
    borrowed: slice | None

    @classmethod
    def of(cls, cut: Cut, total: int, first: int, replicas: int) -> Share:
        """The share of the worker that has `replicas` replicas, the first of which has the number `first`."""
        of_all = cut(total)
        slices = of_all[first : first + replicas]
        has_rows = any(piece.stop > piece.start for piece in slices)
        return cls(slices, None if has_rows or not total else of_all[0])

    @property
    def loaded(self) -> slice:
        """The rows that this worker reads, which stand together."""
        return self.borrowed or slice(self.slices[0].start, max(piece.stop for piece in self.slices))

    def within_loaded(self) -> Share:
        """The same, where the rows are counted from the first one that this worker reads."""
        if self.borrowed is not None:
            return Share([slice(0, 0)] * len(self.slices), slice(0, self.borrowed.stop - self.borrowed.start))
        start = self.loaded.start
        return Share([slice(piece.start - start, piece.stop - start) for piece in self.slices], None)


@final
class ShardedBatches(Sampler[list[Any]]):
    """The indices that one worker loads of the batches of a batch sampler.

    Args:
        sampler: The batch sampler of the user's loader, with the global batch size.
        cut: Cuts the rows of a batch into a part for each replica of all workers.
        first: The number of this worker's first replica.
        replicas: How many replicas this worker has.

    Attributes:
        totals: For each batch of the newest iteration that was drawn and not read, how many rows it has in all.
    """

    def __init__(self, sampler: Iterable[Sequence[Any]], cut: Cut, first: int, replicas: int) -> None:
        self.sampler = sampler
        self.totals: deque[int] = deque()
        self._cut, self._first, self._replicas = cut, first, replicas

    def __iter__(self) -> Iterator[list[Any]]:
        self.totals = deque()
        return self._drawn(self.totals)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # torch's samplers have a length, and others may

    def _drawn(self, totals: deque[int]) -> Iterator[list[Any]]:
        for batch in self.sampler:
            indices = list(batch)
            totals.append(len(indices))
            yield indices[Share.of(self._cut, len(indices), self._first, self._replicas).loaded]


def can_be_sharded(dataset: Any) -> bool:
    """Whether a worker can load its own rows only: a `DataLoader` that makes batches of a dataset read by index.

    Raises:
        ValueError: If the loader leaves some rows to other processes already.
    """
    if not isinstance(dataset, DataLoader):
        return False
    for sampler in (dataset.sampler, getattr(dataset.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "The loader has a DistributedSampler, which gives each process rows of its own, and so does the "
                "strategy: most rows would be left out. Leave the sampler out, give the loader the global batch size, "
                "and say shuffle=True if the sampler shuffles; or return the loader from the function that you give to "
                "distribute_datasets_from_function, which splits nothing."
            )
    is_plain = type(dataset).__iter__ is DataLoader.__iter__ and getattr(dataset, "in_order", True)
    return is_plain and dataset.batch_sampler is not None and not isinstance(dataset.dataset, IterableDataset)
