"""An iterator that can be begun again, as in TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, Protocol, final, runtime_checkable

from torchstrategy._core.errors import an
from torchstrategy._core.types import Tree
from torchstrategy._input.dataset import DatasetFn
from torchstrategy._input.iterator import BatchIterator
from torchstrategy._input.options import InputContext
from torchstrategy._input.source import is_map_style


@final
class InputIterator(BatchIterator):
    """An iterator over batches that are split among replicas.

    `Strategy.make_dataset_iterator` and `Strategy.make_input_fn_iterator` return it. It reads nothing before the
    program asks for the first batch.

    Example:
        >>> strategy = torchstrategy.compat.v1.OneDeviceStrategy("cpu")
        >>> iterator = strategy.make_dataset_iterator([torch.ones(1), torch.zeros(1)])
        >>> iterator.get_next()
        tensor([1.])
        >>> iterator.initialize()
        >>> list(iterator)
        [tensor([1.]), tensor([0.])]

    Differs from tf.distribute:
        There are no graphs: `initialize` has its effect at once, and need not be called before the first batch.

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/OneDeviceStrategy#make_dataset_iterator
    """

    def __init__(self, dataset: Iterable[Tree]) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Tree] | None = None

    def initialize(self) -> None:
        """Makes the next batch the first one of a new epoch. It ends the threads and loader workers of the old one."""
        self._iterator = None  # a distributed iterator that is dropped ends its threads and workers

    @property
    def initializer(self) -> None:
        """Reading this property calls `initialize()`."""
        return self.initialize()

    def __next__(self) -> Tree:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return next(self._iterator)


@runtime_checkable
class _HasNext(Protocol):
    """An `InputIterator`, a `DistributedIterator`, or what takes their place."""

    def get_next(self) -> Tree: ...


def next_of(iterator: Any) -> Tree:
    """The next batch of an iterator over a distributed dataset.

    Raises:
        TypeError: If it is no such iterator.
    """
    if not isinstance(iterator, _HasNext):
        raise TypeError(
            "An input iterator is what make_dataset_iterator, make_input_fn_iterator or iter(distributed dataset) "
            f"returns, and has get_next(); got {an(type(iterator).__name__)}."
        )
    return iterator.get_next()


def from_input_fn(input_fn: DatasetFn) -> DatasetFn:
    """A function that calls `input_fn` and returns a dataset.

    If `input_fn` returns a function, the elements of the dataset are the results of calls of that function.
    """

    def dataset_fn(context: InputContext) -> Any:
        source = input_fn(context)
        if isinstance(source, Iterable) or is_map_style(source):
            return source
        if callable(source):
            return _Calls(source)
        raise ValueError(
            f"input_fn returns a dataset, or a function that is called for each element; it returned "
            f"{an(type(source).__name__)}."
        )

    return dataset_fn


@final
class _Calls:
    """An iterable over the results of a function, which is called once for each element, until it raises an error."""

    def __init__(self, fn: Callable[[], Tree]) -> None:
        self._fn = fn

    def __iter__(self) -> Iterator[Tree]:
        # It is no generator, since a generator ends when it raises. Here, the next call may return a value again.
        return map(lambda _: self._fn(), repeat(None))
