"""The distributed dataset, its iterators in TensorFlow 2 and 1, and their makers."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Generic, final

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import TypeVar

from torchstrategy._base.errors import an, plural, unpicklable, warn
from torchstrategy._base.row_errors import single_elements_error
from torchstrategy._base.types import Device, Tree
from torchstrategy._data.options import (
    AutoShardPolicy,
    DatasetFn,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from torchstrategy._data.reading import (
    OnDemand,
    Prefetcher,
    Reading,
    Route,
    next_of_all_workers,
)
from torchstrategy._data.source import Source, is_map_style
from torchstrategy._data.steps import OneForEach, SplitSteps, Splitter, share_rule
from torchstrategy._group.workers import Workers, is_refusal

T = TypeVar("T", default=Any)


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
class Optional(Generic[T]):
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

    def __init__(self, values: tuple[T, ...]) -> None:
        self._values = values

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._values)

    def get_value(self) -> T:
        """The batch.

        Raises:
            ValueError: If there is none.
        """
        if not self._values:
            raise ValueError(
                "This Optional holds no batch: the dataset had come to its end. Ask "
                "has_value() first."
            )
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional()"


class BatchIterator(Iterator[T]):
    """An iterator over batches, which you can also advance as in TensorFlow."""

    def get_next(self) -> T:
        """The next batch.

        Raises:
            OutOfRangeError: If there is none; `next(iterator)` raises StopIteration
                then.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The dataset has no more batches.") from None


@final
class DistributedIterator(BatchIterator[T]):
    """One iteration over a `DistributedDataset`; `iter(dataset)` returns it.

    If it is dropped or closed before its end, it ends the threads and the loader
    workers that it has started.

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

    def __init__(
        self, reading: Reading, splitter: Splitter, ended: Callable[[], None]
    ) -> None:
        self._reading = reading
        self._splitter = splitter
        self._next = (
            next_of_all_workers(reading) if splitter.reads_its_own else reading.next
        )
        self._ended = ended
        self._is_over = False
        weakref.finalize(self, _close, weakref.ref(reading))

    def __repr__(self) -> str:
        return f"DistributedIterator({self._splitter})"

    @property
    def element_spec(self) -> Tree:
        """What the elements are made of; see `DistributedDataset.element_spec`."""
        return self._splitter.spec()

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        try:
            return self._next()  # type: ignore[no-any-return]
        except StopIteration:
            self._ended()
            self.close()
            raise
        except BaseException as error:
            workers = self._splitter.workers
            if isinstance(error, Exception) and is_refusal(error):
                workers.refuse(error, "the next batch of a dataset")
            # They wait for this worker, which does not come.
            workers.tell_failure(error)
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(
            self,
            "it reads a loader of this process. Save where it stands, with the "
            "state_dict() of the dataset that it iterates over; where it goes on, give "
            "that to a dataset with load_state_dict, and iterate over it.",
        )

    def get_next_as_optional(self) -> Optional[T]:
        """The next batch, if there is one."""
        return Optional(tuple(islice(self, 1)))

    def close(self) -> None:
        """Ends the iteration, and the threads and loader workers that it started."""
        self._is_over = True
        self._next = self._reading.next
        self._reading.close()


def _close(reading: weakref.ref[Reading]) -> None:
    """Ends a reading whose iterator is gone, if its threads still have it."""
    if (left := reading()) is not None:
        left.close()


@final
class InputIterator(BatchIterator[Any]):
    """An iterator over batches that are split among replicas.

    `Strategy.make_dataset_iterator` and `Strategy.make_input_fn_iterator` return it. It
    reads nothing before the program asks for the first batch.

    Example:
        >>> strategy = torchstrategy.compat.v1.OneDeviceStrategy("cpu")
        >>> iterator = strategy.make_dataset_iterator([torch.ones(1), torch.zeros(1)])
        >>> iterator.get_next()
        tensor([1.])
        >>> iterator.initialize()
        >>> list(iterator)
        [tensor([1.]), tensor([0.])]

    Differs from tf.distribute:
        There are no graphs: `initialize` has its effect at once, and need not be called
        before the first batch.

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/OneDeviceStrategy#make_dataset_iterator
    """

    def __init__(self, dataset: Iterable[Tree]) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Tree] | None = None

    def initialize(self) -> None:
        """Makes the next batch the first one of a new epoch.

        It ends the threads and loader workers of the old one.
        """
        # A distributed iterator that is dropped ends its threads and workers.
        self._iterator = None

    @property
    def initializer(self) -> None:
        """Reading this property calls `initialize()`."""
        return self.initialize()

    def __next__(self) -> Tree:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return next(self._iterator)


def next_of(iterator: Any) -> Tree:
    """The next batch of an iterator over a distributed dataset.

    Raises:
        TypeError: If it is no such iterator.
    """
    if not hasattr(iterator, "get_next"):
        raise TypeError(
            "An input iterator is what make_dataset_iterator, make_input_fn_iterator "
            "or iter(distributed dataset) returns, and has get_next(); got "
            f"{an(type(iterator).__name__)}."
        )
    return iterator.get_next()


def from_input_fn(input_fn: DatasetFn) -> DatasetFn:
    """A function that calls `input_fn` and returns a dataset.

    If `input_fn` returns a function, the elements of the dataset are the results of
    calls of that function.
    """

    def dataset_fn(context: InputContext) -> Any:
        source = input_fn(context)
        if isinstance(source, Iterable) or is_map_style(source):
            return source
        if callable(source):
            return _Calls(source)
        raise ValueError(
            "input_fn returns a dataset, or a function that makes an element; got "
            f"{an(type(source).__name__)}."
        )

    return dataset_fn


@final
class _Calls:
    """An iterable over the results of a function.

    It calls the function once for each element, until the function raises an error.
    """

    def __init__(self, fn: Callable[[], Tree]) -> None:
        self._fn = fn

    def __iter__(self) -> Iterator[Tree]:
        # It is no generator, since a generator ends when it raises. Here, the next call
        # may return a value again.
        return map(lambda _: self._fn(), repeat(None))


@final
class DistributedDataset(Generic[T]):
    """An iterable of batches that are split among replicas.

    `Strategy.experimental_distribute_dataset` returns it.

    Each iteration starts again, as with the loader. The loader is not read before an
    iteration begins. The length of the dataset is that of the loader.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
        >>> dataset = strategy.experimental_distribute_dataset(loader)
        >>> len(dataset), list(dataset)
        (2, [tensor([0, 1]), tensor([2, 3])])

    Differs from tf.distribute:
        `len` works if the loader has a length. TensorFlow has no `state_dict` and no
        `load_state_dict`.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(
        self, splitter: Splitter, routes: Sequence[Route], options: InputOptions
    ) -> None:
        self._splitter = splitter
        self._routes = tuple(routes)
        has_workers = any(source.has_workers for source in splitter.sources)
        is_ahead = has_workers if options.load_ahead is None else options.load_ahead
        ahead = functools.partial(
            Prefetcher, depth=options.experimental_per_replica_buffer_size
        )
        self._read: Callable[[Splitter, Sequence[Route]], Reading] = (
            ahead if is_ahead else OnDemand
        )

    def __iter__(self) -> DistributedIterator[T]:
        """A new iteration.

        It starts the loader's workers, and draws their seeds, on this thread.
        """
        # Persistent workers serve one epoch at a time, also if one loader is in several
        # distributed datasets. So the last epoch over the loader is ended first.
        shared = [
            id(source._dataset)
            for source in self._splitter.sources
            if source.allows_one_pass_at_a_time
        ]
        for last in filter(None, map(_readings.get, shared)):
            last.close(waits=True)
        try:
            reading = self._read(self._splitter, self._routes)
        except BaseException as error:
            # The others are told before the loader is dropped: torch may wait for 5 s
            # for a worker of it.
            self._splitter.workers.tell_failure(error)
            raise
        _readings.update(dict.fromkeys(shared, reading))
        positions = [source.position for source in self._splitter.sources]

        def restart() -> None:
            for position in positions:
                position.restart()

        return DistributedIterator(reading, self._splitter, ended=restart)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, T], Any]) -> Any:
        """Calls `state = reduce_func(state, batch)` for every batch.

        It returns the last state.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> dataset = strategy.experimental_distribute_dataset(
            ...     [torch.ones(3), torch.ones(4)]
            ... )
            >>> dataset.reduce(
            ...     0,
            ...     lambda total, batch: total + strategy.reduce("sum", batch, axis=0),
            ... )
            tensor(7.)

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset#reduce
        """
        return functools.reduce(reduce_func, self, initial_state)

    def __len__(self) -> int:
        if self._splitter.reads_its_own:
            raise TypeError(
                "How many steps the workers take together is not known before they "
                "have read: each has a dataset of its own, and the iteration ends "
                "where the last of them ends."
            )
        return len(self._splitter)

    def __repr__(self) -> str:
        return f"DistributedDataset({self._splitter})"

    def __copy__(self) -> DistributedDataset[T]:
        return self._copy_with(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataset[T]:
        return self._copy_with(copy.deepcopy(vars(self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(
            self,
            "it distributes batches to replicas of this process. Save where it stands, "
            "dataset.state_dict(); where it goes on, distribute the loader anew, and "
            "give it that with load_state_dict.",
        )

    def _copy_with(self, attributes: dict[str, Any]) -> DistributedDataset[T]:
        copied = object.__new__(DistributedDataset)
        vars(copied).update(attributes)
        return copied

    @property
    def dataset(self) -> Any:
        """The dataset of the loader.

        `len(distributed.dataset)` is the number of rows of an epoch.
        """
        return self._splitter.sources[0].of_loader("dataset")

    @property
    def batch_size(self) -> int | None:
        """The `batch_size` of the loader.

        It is the size for all replicas together, unless a function made the loader.
        """
        return self._splitter.sources[0].of_loader("batch_size")  # type: ignore[no-any-return]

    @property
    def sampler(self) -> Any:
        """The sampler of the loader, as for `distributed.sampler.set_epoch(epoch)`."""
        return self._splitter.sources[0].of_loader("sampler")

    @property
    def element_spec(self) -> Tree:
        """What the elements are made of: a `TensorSpec` for each tensor.

        The specs stand in the containers that the loader makes.

        With several replicas, there is a `PerReplicaSpec` for each value with rows. The
        number of rows is known only if the loader drops a smaller last batch, and each
        replica gets the same number of rows of every batch.

        The property looks at one element, which no iteration loses, and leaves torch's
        random generators as they were. The sizes of the other dimensions are those of
        this element; other elements are not checked.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
            >>> dataset = strategy.experimental_distribute_dataset(loader)
            >>> dataset.element_spec.value_specs[0]
            TensorSpec(shape=(None, 3), dtype=torch.float32)

        Raises:
            ValueError: If there is no element, or if it would be lost by looking at it.
        """
        return self._splitter.spec()

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iteration.

        It is the position after the last batch that the program got.

        Batches that were only read ahead do not count. As without a strategy, a
        checkpoint also needs the state of torch's generator. If the loader has
        `state_dict` and `load_state_dict`, the position is what these say. For any
        other loader, the library counts the batches, and saves the states of the
        generators that decide their order: torch's default generator, and the
        `torch.Generator` objects that the loader, its samplers and an iterable dataset
        have as attributes. When an iteration has ended, the position is that before the
        next iteration.

        Returns:
            A dict of numbers, lists, dicts and tensors; and of what the loader's own
            `state_dict` returned.

        Example:
            >>> loader = torch.utils.data.DataLoader(
            ...     torch.arange(6), batch_size=2, shuffle=True
            ... )
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
            >>> two = strategy.experimental_distribute_dataset(loader)
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
            >>> three = strategy.experimental_distribute_dataset(loader)
            >>> iterator = iter(two)
            >>> batch = next(iterator)
            >>> three.load_state_dict(two.state_dict())
            >>> [len(list(three)), len(list(three))]
            [2, 3]
        """
        return {"sources": [source.state() for source in self._splitter.sources]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next iteration go on where `state_dict()` was called.

        It begins with the batch after the last one that the program had got by then.

        The strategy may have another number of replicas now, and the loader another
        number of workers. The batch size may also have changed, if a batch of the new
        size begins at the next row; so a dataset function may use
        `get_per_replica_batch_size`. If the loader reads a map-style dataset, the rows
        that are skipped are not loaded; rows of anything else are read and dropped.

        The rows come in the same order if torch's generators decide it, as with torch's
        samplers. An object that draws during the whole iteration and remembers what it
        drew, such as a shuffling buffer, needs a generator of its own for this. Loader
        workers that draw random numbers start from a new seed.

        Raises:
            ValueError: If the state is of a dataset of another kind, or ends within a
                batch of this one.
            TypeError: If it is no such state.
        """
        sources = self._splitter.sources
        states = state_dict.get("sources") if isinstance(state_dict, dict) else None
        if not isinstance(states, list) or len(state_dict) != 1:
            raise TypeError(
                "load_state_dict takes what DistributedDataset.state_dict() returned, "
                f"{{'sources': [...]}}; got {type(state_dict).__name__} "
                f"{state_dict!r:.60}."
            )
        if len(states) != len(sources):
            raise ValueError(
                "The state is of a dataset that reads "
                f"{plural(len(states), 'loader')}, and this one reads {len(sources)}: "
                "what each replica had consumed of its own cannot be given to another "
                "number of them."
            )
        # Nothing is loaded unless all of them are right.
        positions = list(map(Source.position_of, sources, states))
        for source, position in zip(sources, positions, strict=True):
            source.load_position(position)


def distribute_dataset(
    dataset: Any, devices: Sequence[Device], options: InputOptions, workers: Workers
) -> DistributedDataset:
    """A dataset whose batches of the global size are split into a part for each device.

    Raises:
        TypeError: If `dataset` cannot be iterated over.
        ValueError: If it yields single elements where batches are needed, or `options`
            do not fit.
        NotImplementedError: If an input pipeline for each replica is asked for.
    """
    replicas = len(devices)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "A dataset is one input pipeline, and "
            "InputOptions(experimental_replication_mode=PER_REPLICA) asks for one for "
            "each replica. Give distribute_datasets_from_function a function that "
            "makes them."
        )
    share = share_rule(options, replicas, workers)
    is_dealt = (
        workers.count > 1
        and options.experimental_auto_shard_policy is not AutoShardPolicy.OFF
    )
    is_sharded = is_dealt and _can_be_sharded(dataset)
    source = _source(
        dataset,
        "A dataset to distribute",
        (lambda rows: share(rows).loaded) if is_sharded else None,
    )
    replicas_of_all = replicas * workers.count
    if replicas_of_all > 1 and is_map_style(dataset):
        raise single_elements_error(type(dataset).__name__, replicas_of_all)
    if is_dealt and not (is_sharded or isinstance(dataset, (list, tuple))):
        warn(
            f"Every worker reads all of this {type(dataset).__name__}, and keeps the "
            "rows of its own replicas: nobody can tell which rows they are before they "
            "are read. Give the strategy a torch.utils.data.DataLoader of a dataset "
            "that is read by index, and each worker reads its own rows only; or let a "
            "function make the dataset of each worker: "
            "strategy.distribute_datasets_from_function(dataset_fn).",
            UserWarning,
        )
    return DistributedDataset(
        SplitSteps(source, devices, options, workers),
        _routes(devices, options),
        options,
    )


def _can_be_sharded(dataset: Any) -> bool:
    """Whether a worker can load its own rows only.

    It can if a `DataLoader` makes batches of a dataset that is read by index.

    Raises:
        ValueError: If the loader leaves some rows to other processes already.
    """
    if not isinstance(dataset, DataLoader):
        return False
    for sampler in (dataset.sampler, getattr(dataset.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "The loader has a DistributedSampler, which gives each process rows of "
                "its own, and so does the strategy: most rows would be left out. Leave "
                "the sampler out, give the loader the global batch size, and say "
                "shuffle=True if the sampler shuffles; or return the loader from the "
                "function that you give to distribute_datasets_from_function, which "
                "splits nothing."
            )
    is_plain = type(dataset).__iter__ is DataLoader.__iter__ and getattr(
        dataset, "in_order", True
    )
    return (
        is_plain
        and dataset.batch_sampler is not None
        and not isinstance(dataset.dataset, IterableDataset)
    )


def distribute_from_function(
    dataset_fn: DatasetFn,
    devices: Sequence[Device],
    options: InputOptions,
    workers: Workers,
) -> DistributedDataset[Any]:
    """A dataset whose elements are not split: each goes to one replica.

    Raises:
        TypeError: If what the function returns cannot be iterated over.
        ValueError: If `options` do not fit.
    """
    if options.row_shares is not None:
        raise ValueError(
            "InputOptions(row_shares=...) says how a global batch is cut, and what a "
            "dataset function's dataset yields is not cut: each element goes to one "
            "replica. Let the function make batches of the sizes that you want."
        )
    replicas = len(devices)
    everyone = replicas * workers.count
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        contexts = [
            InputContext(everyone, workers.index * replicas + r, everyone)
            for r in range(replicas)
        ]
    else:
        contexts = [InputContext(workers.count, workers.index, everyone)]
    sources = [
        _source(dataset_fn(context), "What dataset_fn returns") for context in contexts
    ]
    splitter = OneForEach(sources, replicas, options.lists_are_rows, workers)
    return DistributedDataset(splitter, _routes(devices, options), options)


def _source(
    dataset: Any, what: str, loaded_of: Callable[[int], slice] | None = None
) -> Source:
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise TypeError(
            "This dataset is distributed already: it cannot be distributed again. Give "
            "the loader that it was made of."
        )
    return Source(dataset, what, loaded_of)


def _routes(devices: Sequence[Device], options: InputOptions) -> list[Route]:
    return [
        Route(device if options.experimental_fetch_to_device else None)
        for device in devices
    ]


# By the id of each loader with persistent workers, which is alive as long as this: the
# last epoch over it.
_readings: weakref.WeakValueDictionary[int, Reading] = weakref.WeakValueDictionary()
