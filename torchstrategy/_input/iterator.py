"""One iteration over a distributed dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torchstrategy._core.errors import unpicklable
from torchstrategy._core.types import Tree
from torchstrategy._input.on_demand import Reading
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
