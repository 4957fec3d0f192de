"""A dataset that deals out what a loader yields, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchstrategy._types import Tree


@final
class DistributedDataset:
    """What `Strategy.experimental_distribute_dataset` returns: an iterable of batches, dealt out to the replicas.

    Each iteration starts afresh, as the loader does, and reads a batch when it is asked for one. Its length is the
    loader's.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
        >>> dataset = strategy.experimental_distribute_dataset(loader)
        >>> len(dataset), list(dataset)
        (2, [tensor([0, 1]), tensor([2, 3])])

    Differs from tf.distribute:
        `len` works where the loader has one.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(self, batches: Iterable[Tree], deal: Callable[[Tree], Tree]) -> None:
        self._batches = batches
        self._deal = deal
        self._is_spent = False

    def __iter__(self) -> Iterator[Tree]:
        if self._is_spent:
            raise RuntimeError(
                f"The dataset is a {type(self._batches).__name__}, which can be iterated over once, and has been. "
                "Distribute something that starts afresh, such as a torch.utils.data.DataLoader."
            )
        self._is_spent = isinstance(self._batches, Iterator)
        return map(self._deal, _iterator(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def check_is_dataset(dataset: Any, replicas: int) -> None:
    """Refuses what cannot be dealt out to `replicas` replicas.

    Raises:
        TypeError: If it cannot be iterated over.
        ValueError: If it yields single elements where batches are needed.
    """
    if _is_unbatched(dataset):
        if replicas > 1:
            raise ValueError(
                f"{type(dataset).__name__} yields single elements, which cannot be dealt out to {replicas} replicas. "
                "Batch it: torch.utils.data.DataLoader(dataset, batch_size=...), with the global batch size."
            )
    elif not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes)):
        raise TypeError(
            "A dataset to distribute is a torch.utils.data.DataLoader, or another iterable of batches; got a "
            f"{type(dataset).__name__}."
        )


def _is_unbatched(dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and not isinstance(dataset, (IterableDataset, DataLoader))


def _iterator(batches: Any) -> Iterator[Tree]:
    if _is_unbatched(batches):
        return (batches[index] for index in range(len(batches)))
    return iter(batches)
