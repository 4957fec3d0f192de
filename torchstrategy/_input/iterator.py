"""The iterators over a distributed dataset: one iteration, and one that can be begun again, as in TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, Protocol, final, runtime_checkable

from torchstrategy._core.errors import an, unpicklable
from torchstrategy._core.types import Tree
from torchstrategy._input.options import DatasetFn, InputContext
from torchstrategy._input.reading import Reading
from torchstrategy._input.source import is_map_style
from torchstrategy._input.steps import Splitter


@final
class OutOfRangeError(EOFError):
    """Raised by `DistributedIterator.get_next` when there are no more batches.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> iterator = iter(strategy.experimental_distribute_dataset([torch.ones(2)]))
        >>> iterator.get_next()
        tensor([1., 1.])
        >>> try:
        ...     iterator.get_next()
        ... except torchstrategy.OutOfRangeError as error:
        ...     print(error)
        The dataset has no more batches.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/errors/OutOfRangeError
    """


@final
class Optional:
    """A batch or no batch. `DistributedIterator.get_next_as_optional` returns it.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> iterator = iter(strategy.experimental_distribute_dataset([torch.ones(2)]))
        >>> batch = iterator.get_next_as_optional()
        >>> batch.has_value(), batch.get_value()
        (True, tensor([1., 1.]))
        >>> iterator.get_next_as_optional().has_value()
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/experimental/Optional
    """

    def __init__(self, values: tuple[()] | tuple[Tree]) -> None:
        self._values = values

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._values)

    def get_value(self) -> Tree:
        """The batch.

        Raises:
            ValueError: If there is none.
        """
        if not self._values:
            raise ValueError("This Optional holds no batch: the dataset had come to its end. Ask has_value() first.")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional()"


class BatchIterator(Iterator[Tree]):
    """An iterator over batches whose next one can be asked for as in TensorFlow, too."""

    def get_next(self) -> Tree:
        """The next batch.

        Raises:
            OutOfRangeError: If there is none; `next(iterator)` raises StopIteration then.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The dataset has no more batches.") from None


@final
class DistributedIterator(BatchIterator):
    """One iteration over a `DistributedDataset`; `iter(dataset)` returns it.

    If it is dropped or closed before its end, it ends the threads and the loader workers that it has started.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
        >>> iterator = iter(strategy.experimental_distribute_dataset(loader))
        >>> next(iterator)
        PerReplica:{
          0: tensor([0]),
          1: tensor([1])
        }

    Differs from tf.distribute:
        `get_next` leaves out no batch if the data runs out in the middle of a step.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedIterator
    """

    def __init__(self, reading: Reading, splitter: Splitter, ended: Callable[[], None]) -> None:
        self._reading = reading
        self._splitter = splitter
        self._ended = ended
        self._is_over = False

    @property
    def element_spec(self) -> Tree:
        """What the elements are made of; see `DistributedDataset.element_spec`."""
        return self._splitter.spec()

    def __next__(self) -> Tree:
        if self._is_over:
            raise StopIteration
        try:
            return self._reading.next()
        except StopIteration:
            self._ended()
            self.close()
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(
            self,
            "it reads a loader of this process. Save where it stands, with the state_dict() of the dataset that it "
            "iterates over; where it goes on, give that to a dataset with load_state_dict, and iterate over it.",
        )

    def get_next_as_optional(self) -> Optional:
        """The next batch, if there is one."""
        try:
            return Optional((next(self),))
        except StopIteration:
            return Optional(())

    def close(self) -> None:
        """Ends the iteration, and the threads and loader workers that it has started."""
        self._is_over = True
        self._reading.close()


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
