"""What is read: a loader, or another iterable of batches; and where a pass over it stands.

A pass can be taken up again, also in another process. A loader that can say itself where it stands (`state_dict`) is
asked to. For any other, the elements that were consumed are counted, and the states of the random generators that the
pass began with are kept, since they decide the order in which a sampler yields: the later pass begins with the same
ones, and leaves as many elements out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchstrategy._errors import an
from torchstrategy._types import Tree

State = dict[str, Any]


@final
class Position:
    """Where the consumer of one pass stands; a reader that is ahead of it stands elsewhere.

    Attributes:
        count: How many elements were consumed.
        generators: The states of the source's generators when the pass began; None: before it began.
        state: What the loader said of itself when it had yielded the last of them; None: it cannot, or can still be
            asked, because nothing is read ahead.
    """

    def __init__(self) -> None:
        self.count = 0
        self.generators: list[torch.Tensor] | None = None
        self.state: Any = None


@final
class Source:
    """A dataset, as it is read pass by pass.

    Args:
        dataset: What a user gave to a strategy.
        what: What it is to the user.

    Raises:
        TypeError: If it cannot be iterated over.
    """

    def __init__(self, dataset: Any, what: str) -> None:
        if not is_map_style(dataset) and (not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes))):
            raise TypeError(
                f"{what} is a torch.utils.data.DataLoader, or another iterable of batches; got "
                f"{an(type(dataset).__name__)}."
            )
        self._dataset = dataset
        self._is_spent = False
        self._peeked: list[Tree] = []
        self._resumed: State | None = None
        self.position = Position()  # that of the pass that began last

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def has_workers(self) -> bool:
        """Whether its elements are loaded in processes of its own."""
        return bool(getattr(self._dataset, "num_workers", 0))

    @property
    def allows_one_pass_at_a_time(self) -> bool:
        """Whether a new pass takes the workers away from the one before."""
        return bool(getattr(self._dataset, "persistent_workers", False))

    @property
    def keeps_state(self) -> bool:
        """Whether it can say itself where it stands, and go on from there."""
        return all(callable(getattr(self._dataset, name, None)) for name in ("state_dict", "load_state_dict"))

    @property
    def rows(self) -> int | None:
        """How many rows each of its elements has, if that is certain beforehand."""
        sampler = getattr(self._dataset, "batch_sampler", None)
        return getattr(sampler, "batch_size", None) if getattr(sampler, "drop_last", False) else None

    def begin(self) -> Pass:
        """A new pass, from the beginning or from where `load_state` said. The caller's thread draws its seeds.

        Raises:
            RuntimeError: If there was a pass already, and there can be no other.
        """
        if self._is_spent:
            raise RuntimeError(
                f"The dataset is a {type(self._dataset).__name__}, which can be iterated over once, and has been. "
                "Distribute something that starts afresh, such as a torch.utils.data.DataLoader."
            )
        state, self._resumed = self._resumed, None
        self.position = position = Position()
        if self.keeps_state:
            iterator = self._iterator()
            position.count = 0 if state is None else state["batches"]
        elif state is None:
            position.generators = [generator.get_state() for generator in self._generators()]
            iterator = self._iterator()
        else:
            position.generators, position.count = state["generators"], state["batches"]
            with _turned_back(self._generators(), position.generators):
                iterator = self._iterator_from(position.count)
        self._is_spent = isinstance(self._dataset, Iterator)
        return Pass(self, iterator, position)

    def state(self) -> State:
        """Where the pass that began last stands, as plain values and tensors."""
        position = self.position
        loader = None
        if self.keeps_state:
            loader = self._dataset.state_dict() if position.state is None else position.state
        return {"batches": position.count, "generators": position.generators, "loader": loader}

    def check_state(self, state: State) -> None:
        """Refuses the state of a source of another kind.

        Raises:
            ValueError: If it is of another kind.
            TypeError: If it is no state.
        """
        if not isinstance(state, dict) or {"batches", "generators", "loader"} != state.keys():
            raise TypeError(f"{state!r:.60} is not the state of a loader that DistributedDataset.state_dict() returns.")
        generators = state["generators"]
        if self.keeps_state != (state["loader"] is not None):
            kinds = ("whose batches are counted", "that keeps its own state (state_dict)")
            raise ValueError(
                f"The state is of a loader {kinds[not self.keeps_state]}, and this one, a "
                f"{type(self._dataset).__name__}, is one {kinds[self.keeps_state]}. Load it where it was taken."
            )
        if generators is not None and len(generators) != len(self._generators()):
            raise ValueError(
                f"The state is of a loader with {len(generators) - 1} random generators of its own, and this one has "
                f"{len(self._generators()) - 1}. Make the loader as it was made there."
            )

    def load_state(self, state: State) -> None:
        """Makes the next pass go on from where `state` was taken. It was checked."""
        generators = state["generators"]
        if self.keeps_state:
            self._dataset.load_state_dict(state["loader"])
        self._resumed = dict(state) if self.keeps_state or generators is not None else None  # None: at the beginning
        self.position = Position()
        self.position.count, self.position.generators = state["batches"], generators
        self.position.state = state["loader"]

    def is_over(self, position: Position) -> None:
        """Says that the consumer of a pass has come to its end. If it is the last pass, the next one stands there."""
        if position is self.position:
            self.position = Position()

    def first(self) -> Tree:
        """An element, to see what they are made of. No pass loses it, and no generator of torch notices.

        Of a `DataLoader` it has one row, or is one sample.

        Raises:
            ValueError: If there is none.
        """
        if isinstance(self._dataset, Iterator):
            self._peeked = self._peeked or list(itertools.islice(self._dataset, 1))
            found = self._peeked
        else:
            generators = self._generators()
            with _turned_back(generators, [generator.get_state() for generator in generators], all_of_them=True):
                found = list(itertools.islice(_samples(self._dataset), 1))
        if not found:
            raise ValueError("The dataset is empty, so it is not known what its elements are made of.")
        return found[0]

    def _generators(self) -> list[torch.Generator]:
        """Those that decide the order: of the loader, of its samplers, and torch's own where one has none."""
        loader = self._dataset
        parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
        own = [getattr(part, "generator", None) for part in parts]
        found = [generator for generator in own if isinstance(generator, torch.Generator)]
        return list({id(generator): generator for generator in [torch.default_generator, *found]}.values())

    def _iterator(self) -> Iterator[Tree]:
        if is_map_style(self._dataset):
            return (self._dataset[index] for index in range(len(self._dataset)))
        return itertools.chain(self._peeked, self._dataset) if self._peeked else iter(self._dataset)

    def _iterator_from(self, count: int) -> Iterator[Tree]:
        """The elements after the first `count`. Those of a plain loader are not even loaded."""
        loader = self._dataset
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            iterator = self._iterator()
            for _ in range(count):
                next(iterator, None)
            return iterator
        rest = _Rest(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, count)
        iterator = iter(_with_indices(loader, rest))  # draws the seed of the workers, before the sampler draws its own
        rest.begin()
        return iterator


@final
class Pass:
    """One pass over a source, on one thread at a time. After an error it goes on, if its loader does."""

    def __init__(self, source: Source, iterator: Iterator[Tree], position: Position) -> None:
        self._source = source
        self._iterator = iterator
        self.position = position
        self.count = position.count  # of elements that were read

    def __iter__(self) -> Iterator[Tree]:
        return self

    def __next__(self) -> Tree:
        element = next(self._iterator)
        self.count += 1
        return element

    def state_of_loader(self) -> Any:
        """What the loader says of itself, right after it yielded; None if it cannot."""
        return self._source._dataset.state_dict() if self._source.keeps_state else None


def is_map_style(dataset: Any) -> bool:
    """Whether it is a dataset of single elements, which have numbers and no order."""
    return isinstance(dataset, Dataset) and not isinstance(dataset, (IterableDataset, DataLoader))


def _samples(dataset: Any) -> Iterator[Tree]:
    """What its elements are like, without any workers."""
    if is_map_style(dataset):
        return (dataset[index] for index in range(len(dataset)))
    if not isinstance(dataset, DataLoader):
        return iter(dataset)
    batches = dataset.batch_sampler is not None
    if isinstance(dataset.dataset, IterableDataset):
        samples = iter(dataset.dataset)
    else:
        indices = itertools.chain.from_iterable(dataset.batch_sampler or ()) if batches else iter(dataset.sampler)
        samples = (dataset.dataset[index] for index in indices)
    return (dataset.collate_fn([sample] if batches else sample) for sample in samples)


def _with_indices(loader: DataLoader[Any], indices: Iterable[Any]) -> DataLoader[Any]:
    """A loader like this one, which yields these batches, or samples if it does not make batches."""
    chosen = {"sampler": indices, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": indices}
    return DataLoader(loader.dataset, **chosen, **{name: getattr(loader, name) for name in _OF_A_LOADER})


@contextmanager
def _turned_back(
    generators: list[torch.Generator], states: list[torch.Tensor], *, all_of_them: bool = False
) -> Iterator[None]:
    """A block in which generators are in given states. After it torch's own, or all of them, are as before."""
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in zip(generators if all_of_them else generators[:1], before, strict=False):
            generator.set_state(state)


@final
class _Rest:
    """What a sampler yields after the first `count`."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._indices = itertools.islice(sampler, count, None)
        self._first: list[Any] | None = None

    def begin(self) -> None:
        """Makes the sampler draw its numbers now, while the generators are turned back."""
        if self._first is None:
            self._first = list(itertools.islice(self._indices, 1))

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        assert self._first is not None
        yield from self._first
        yield from self._indices


_OF_A_LOADER = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "pin_memory_device",
    "in_order",
)
