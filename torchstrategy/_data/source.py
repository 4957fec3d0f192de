"""The loader or iterable that is read, and where its iteration stands.

It also says which rows a worker loads from it.

An epoch can be resumed, also in another process. If the loader has `state_dict`, the
library saves its state. For any other loader, the library counts the elements that were
consumed, and saves the states of the random generators that decide the sampler's order:
the resumed epoch begins with the same states, and skips as many elements. A loader
draws random numbers at two moments, between which the program may draw others: it draws
the seed of its workers when an epoch begins, and its sampler draws when the loader
first iterates over it. With workers, this is when the epoch begins; without workers,
when the first batch is read.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain, islice
from typing import Any, final

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
)

from torchstrategy._base.errors import an
from torchstrategy._base.torch_internals import count_function_modes
from torchstrategy._base.types import Tree
from torchstrategy._data.loader_state import State, check_form, check_generators
from torchstrategy._data.same_rows import Read, begin_alike, mark_of_subsets
from torchstrategy._data.shards import Shard, ShardedBatches
from torchstrategy._group.workers import Workers


@final
@dataclass(eq=False)
class Position:
    """The position of the consumer in one epoch.

    A reader that reads ahead is at a later position.

    Attributes:
        is_begun: Whether the epoch has begun.
        count: How many elements were consumed.
        began: The states of the source's generators when the epoch began.
        asked: Their states when the loader first iterated over the sampler. Empty: they
            were the same as when the epoch began. None: it was when the epoch began,
            after the loader had drawn a seed for its workers.
        loader: The loader's own `state_dict` after it had yielded the last element that
            was consumed. None: it has no `state_dict`, or nothing is read ahead, so
            that the library can call it later.
    """

    is_begun: bool = False
    count: int = 0
    began: list[torch.Tensor] = field(default_factory=list)
    asked: list[torch.Tensor] | None = None
    loader: Any = None

    def reach(self, count: int, loader: Any) -> None:
        """Says that the consumer has received an element.

        The arguments are the attributes of these names after it.
        """
        self.count, self.loader = count, loader

    def restart(self) -> None:
        """Says that the consumer has come to the end of the epoch.

        The consumer now stands before the next epoch.
        """
        self.is_begun, self.count, self.asked, self.loader = False, 0, None, None


@final
class Source:
    """A loader or another iterable, as it is read epoch by epoch.

    Args:
        dataset: The object that a user gave to a strategy.
        what: What messages call it.
        loaded_of: Returns which rows this process loads of a number of rows of a batch.
            None: it loads all.

    Attributes:
        keeps_state: Whether the loader can save and restore its own position.
        is_batched: Whether the elements may be batches.
        allows_one_pass_at_a_time: Whether a new epoch takes the workers away from the
            epoch before.
        shows_each_once: Whether an element cannot be looked at without taking it from
            an epoch that has begun.
        position: The position in the epoch that began last.

    Raises:
        TypeError: If it cannot be iterated over.
    """

    def __init__(
        self, dataset: Any, what: str, loaded_of: Callable[[int], slice] | None = None
    ) -> None:
        if not is_map_style(dataset) and (
            not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes))
        ):
            raise TypeError(
                f"{what} is a torch.utils.data.DataLoader, or another iterable of "
                f"batches; got {an(type(dataset).__name__)}."
            )
        self._given = self._dataset = dataset
        if loaded_of is not None:
            self._dataset = _copy_loader(
                dataset, ShardedBatches(dataset.batch_sampler, loaded_of)
            )
        self.keeps_state = all(
            callable(getattr(dataset, name, None))
            for name in ("state_dict", "load_state_dict")
        )
        self.is_batched = not is_map_style(dataset)
        self.allows_one_pass_at_a_time = bool(
            getattr(dataset, "persistent_workers", False)
        )
        self._once = (
            _PeekableIterator(dataset)
            if isinstance(dataset, Iterator) and not self.keeps_state
            else None
        )
        self._is_spent = False
        # Whether the next epoch goes on from the position of `load_position`.
        self._is_resumed = False
        self.shows_each_once = (
            self._once is not None or self.keeps_state or _streams(dataset)
        )
        self.position = Position()

    def __len__(self) -> int:
        return len(self._dataset)

    def __str__(self) -> str:
        kind, within = type(self._given).__name__, getattr(self._given, "dataset", None)
        if within is None:
            return kind
        return (
            f"{kind} of {an(type(within).__name__)}, "
            f"batch_size={getattr(self._given, 'batch_size', None)}"
        )

    def of_loader(self, name: str) -> Any:
        """An attribute of the loader that was given.

        Raises:
            AttributeError: If that has none of this name.
        """
        if not hasattr(self._given, name):
            raise AttributeError(
                f"A distributed dataset has the {name} of the loader that it splits, "
                f"and the {type(self._given).__name__} that was given has none. Give a "
                "torch.utils.data.DataLoader."
            )
        return getattr(self._given, name)

    @property
    def has_workers(self) -> bool:
        """Whether worker processes load the elements."""
        return bool(getattr(self._dataset, "num_workers", 0))

    @property
    def makes_columns(self) -> bool:
        """Whether the tensors in a list from this source are certainly columns.

        They are if the loader stacks samples.
        """
        return getattr(self._dataset, "collate_fn", None) is default_collate

    @property
    def rows(self) -> int | None:
        """How many rows each element has, if this is certain before it is read."""
        sampler = getattr(self._dataset, "batch_sampler", None)
        return (
            getattr(sampler, "batch_size", None)
            if getattr(sampler, "drop_last", False)
            else None
        )

    @property
    def samples(self) -> int | None:
        """Of how many samples the first batch is made, if that is known.

        A `DataLoader` makes the first batch of as many samples as its batch size.
        """
        loader, size = self._given, self._batch_size
        if not isinstance(loader, DataLoader) or size is None:
            return None
        with suppress(TypeError, NotImplementedError):
            # The sampler of a stream has no length.
            size = min(size, len(loader.sampler))  # type: ignore[arg-type]
        return size

    @property
    def asks_sampler_at_once(self) -> bool:
        """Whether the loader iterates over its sampler as soon as an epoch begins.

        Other loaders do so when the first element is read.
        """
        return self.has_workers and _is_plain(self._dataset)

    def reading(self) -> AbstractContextManager[object]:
        """A block in which the source is read.

        The default device in it is the CPU, since a loader runs in host memory. But if
        a generator of the loader is on an accelerator, the default device stays as it
        is.
        """
        if not count_function_modes():  # a default device would be a function mode
            return nullcontext()
        draws_here = all(
            generator.device.type == "cpu" for generator in _generators(self._dataset)
        )
        return torch.device("cpu") if draws_here else nullcontext()

    def begin(self, workers: Workers | None) -> Epoch:
        """A new epoch, from the beginning or from the position of `load_position`.

        The caller's thread draws its seeds.

        Args:
            workers: The processes that read in the order of worker 0. A position of
                `load_position` is the same in all, with the states of torch's
                generators. None: each has an order of its own.

        Raises:
            RuntimeError: If there was a pass already, and there can be no other.
        """
        if workers is not None and workers.count > 1:
            begin_alike(
                workers,
                self._facts(),
                [] if self._is_resumed else _generators(self._dataset),
            )
        if self._is_spent:
            raise RuntimeError(
                f"The dataset is a {type(self._dataset).__name__}, which can be "
                "iterated over once, and has been. Distribute something that starts "
                "afresh, such as a torch.utils.data.DataLoader."
            )
        self._is_spent = self._once is not None
        position = self.position if self._is_resumed else Position()
        position.is_begun = True
        with self.reading():  # seeds are drawn
            iterator = (
                self._resume(position)
                if self._is_resumed
                else self._begin_epoch(position)
            )
        self.position, self._is_resumed = position, False
        sampler = getattr(self._dataset, "batch_sampler", None)
        drawn = sampler.drawn if isinstance(sampler, ShardedBatches) else None
        if drawn:
            for _ in range(position.count):  # of the batches that are left out
                drawn.popleft()
        return Epoch(self, iterator, position, drawn)

    def _facts(self) -> dict[str, Any]:
        """What all workers that read this source have alike, named for messages."""
        within = getattr(self._given, "dataset", None)
        facts: dict[str, Any] = {
            "a dataset of the class": type(
                self._given if within is None else within
            ).__name__
        }
        if within is not None and not isinstance(within, IterableDataset):
            with suppress(TypeError, NotImplementedError):
                facts["a dataset with the number of rows"] = len(within)
        facts["the batch_size"] = self._batch_size
        facts["a loader with the number of batches"] = self._length()
        facts["a Subset whose indices have the digest"] = mark_of_subsets(within)
        facts["a position to go on from, in batches,"] = (
            self.position.count if self._is_resumed else None
        )
        return facts

    def generators_now(self) -> list[torch.Tensor]:
        """The states of the generators that decide the order of the elements."""
        return [generator.get_state() for generator in _generators(self._dataset)]

    def state_of_loader(self) -> Any:
        """The loader's own `state_dict`; None if it has none.

        Called right after the loader has yielded an element.
        """
        # The loader may change its dict.
        return copy.deepcopy(self._dataset.state_dict()) if self.keeps_state else None

    def state(self) -> State:
        """The position in the epoch that began last, as plain values and tensors."""
        position = self.position
        if self.keeps_state:
            said = (
                self.state_of_loader() if position.loader is None else position.loader
            )
            return {"is_begun": position.is_begun, "loader": said}
        return {
            "is_begun": position.is_begun,
            "batches": position.count,
            "batch_size": self._batch_size,
            "began": position.began if position.is_begun else self.generators_now(),
            "asked": position.asked,
        }

    def position_of(self, state: State) -> Position:
        """The position that a source of the same kind has returned as its state.

        Raises:
            ValueError: If it is that of a source of another kind.
            TypeError: If it is no state.
        """
        check_form(state)
        if self.keeps_state != ("loader" in state):
            kinds = (
                "whose batches are counted",
                "that keeps its own state (state_dict)",
            )
            raise ValueError(
                f"The state is of a loader {kinds[not self.keeps_state]}, and this "
                f"one, a {type(self._dataset).__name__}, is one "
                f"{kinds[self.keeps_state]}. Load it where it was taken."
            )
        if self.keeps_state:
            return Position(state["is_begun"], loader=state["loader"])
        generators = _generators(self._dataset)
        for name in ("began", "asked"):
            if name == "began" or state[name]:
                check_generators(name, state[name], generators)
        theirs, ours, count = state["batch_size"], self._batch_size, state["batches"]
        if theirs != ours:
            if theirs is None or ours is None:
                raise ValueError(
                    f"The state is of a loader with batch_size={theirs}, and this one "
                    f"has batch_size={ours}: which of its batches were consumed cannot "
                    "be known. Make the loader as it was made there."
                )
            count, rest = divmod(count * theirs, ours)
            if rest:
                rows = count * ours + rest
                raise ValueError(
                    f"The state stands at row {rows} of a loader with "
                    f"batch_size={theirs}, and with batch_size={ours} no batch begins "
                    f"there. Make the loader with a batch size that divides {rows}."
                )
        # The count may include a small last batch.
        length, size, rest = self._length(), ours or 1, (theirs or 1) - 1
        if length is not None and count * size > length * size + rest:
            raise ValueError(
                f"The state says that batches={state['batches']} were consumed, and "
                f"this loader has {length}. Make the loader as it was made there."
            )
        if count and not state["is_begun"]:
            raise ValueError(
                f"The state says is_begun=False, and batches={count}: it was changed "
                "since it was taken."
            )
        return Position(state["is_begun"], count, state["began"], state["asked"])

    def load_position(self, position: Position) -> None:
        """Makes the next epoch go on from a position that `position_of` returned."""
        if self.keeps_state:
            self._dataset.load_state_dict(position.loader)
        elif not position.is_begun:
            # The program restores torch's default generator, which is the first.
            _set_states(_generators(self._dataset)[1:], position.began[1:])
        self.position, self._is_resumed = position, position.is_begun

    def first(self) -> Tree:
        """An element, from which to read what the elements are made of.

        No epoch loses this element, and no epoch gets other elements or another order
        because of this call. If the source is a `DataLoader`, the element has one row,
        or is one sample.

        Raises:
            ValueError: If there is none, or none can be looked at.
        """
        loader = self._dataset
        if _streams(loader):
            raise ValueError(
                f"The loader's dataset, a {type(loader.dataset).__name__}, is an "
                "iterator: to look at an element of it is to take it away. Ask for "
                "element_spec when the first batch was read."
            )
        found = self._look_at_one() if self._once is None else self._once.peek()
        if not found:
            raise ValueError(
                "The dataset has no element to look at, so it is not known what they "
                "are made of."
            )
        return found[0]

    def _look_at_one(self) -> list[Tree]:
        """One element that will be read again, or none.

        The states of torch's generators stay the same.
        """
        loader = self._dataset
        with _keeping_states(_generators(loader, getattr(loader, "dataset", None))):
            if not self.keeps_state or isinstance(loader, DataLoader):
                samples = (
                    _samples(loader)
                    if isinstance(loader, DataLoader)
                    else self._iterator()
                )
                return list(islice(samples, 1))
            state = self.state_of_loader()
            try:
                return list(islice(loader, 1))
            finally:
                loader.load_state_dict(state)

    @property
    def _batch_size(self) -> int | None:
        size = getattr(self._given, "batch_size", None)
        return size if isinstance(size, int) else None

    def _length(self) -> int | None:
        """How many elements the source has, if this is certain."""
        if isinstance(getattr(self._dataset, "dataset", None), IterableDataset):
            return None  # the length of such a dataset is only an estimate
        with suppress(TypeError, NotImplementedError):
            return len(self._dataset)
        return None

    def _begin_epoch(self, position: Position) -> Iterator[Tree]:
        position.began = self.generators_now()
        running = (
            set(multiprocessing.active_children())
            if self.allows_one_pass_at_a_time
            else set()
        )
        iterator = self._iterator()
        if not self.asks_sampler_at_once:
            position.asked = self.generators_now()
        elif running and running >= set(multiprocessing.active_children()):
            # These are persistent workers, whose seed was drawn when the first epoch
            # began.
            position.asked = []
        return iterator

    def _iterator(self, count: int = 0) -> Iterator[Tree]:
        if is_map_style(self._dataset):
            return map(self._dataset.__getitem__, range(count, len(self._dataset)))
        return iter(self._dataset if self._once is None else self._once)

    def _resume(self, position: Position) -> Iterator[Tree]:
        """The remaining elements.

        The elements before them are not loaded if the dataset is map-style.
        """
        loader, generators, asked = (
            self._dataset,
            _generators(self._dataset),
            position.asked,
        )
        # Torch's default generator goes on from its state in the checkpoint.
        with _keeping_states(generators[:1]):
            if self.keeps_state:
                return self._iterator()
            _set_states(generators, position.began)
            if is_map_style(loader):
                return self._iterator(position.count)
            if not _is_plain(loader) or isinstance(loader.dataset, IterableDataset):
                iterator = self._iterator()
                _set_states(generators, asked or [])
                found = sum(1 for _ in islice(iterator, position.count))
                if found < position.count:
                    raise ValueError(
                        f"The state says that batches={position.count} were consumed, "
                        f"and the dataset has {found}: it is not the one of which the "
                        "state was taken."
                    )
                return iterator
            sampler = (
                loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            )
            if asked is None:
                rest = _RemainingIndices(sampler, position.count)
                # This draws the seed.
                iterator = iter(_copy_loader(loader, rest, persistent_workers=False))
                if self.has_workers:
                    return iterator  # it has begun to iterate over the sampler, too
            indices = iter(sampler)
            _set_states(generators, asked or [])
            # The sampler draws these indices now.
            deque(islice(indices, position.count), maxlen=0)
            # A seed is drawn, but not from the loader's generator.
            return iter(
                _copy_loader(loader, indices, persistent_workers=False, generator=None)
            )


@final
class Epoch:
    """One epoch over a source, read on one thread at a time.

    After an error, it can go on if the loader can.
    """

    def __init__(
        self,
        source: Source,
        iterator: Iterator[Tree],
        position: Position,
        drawn: deque[Read] | None,
    ) -> None:
        self.source = source
        self._iterator = iterator
        self.position = position
        # How many elements were read, including those that raised an error.
        self.count = position.count
        self._drawn = drawn  # what all workers load, of each element that was drawn

    def __next__(self) -> Tree:
        if not self.count and not self.source.asks_sampler_at_once:
            self.position.asked = self.source.generators_now()
        self.count += 1
        read = None
        try:
            element = next(self._iterator)
        except StopIteration:
            self.count -= 1
            # The iteration stays at its end, whatever the loader's iterator would do.
            self._iterator = iter(())
            raise
        finally:
            if self._drawn:
                read = self._drawn.popleft()
        if self._drawn is None:
            return element
        assert read is not None, (
            "the loader yields a batch for each that its sampler has drawn"
        )
        return Shard(element, read)


@final
class _PeekableIterator(Iterator[Tree]):
    """An iterator whose next element can be looked at before it is read."""

    def __init__(self, iterator: Iterator[Tree]) -> None:
        self._iterator = iterator
        self._peeked: list[Tree] = []

    def __next__(self) -> Tree:
        return self._peeked.pop() if self._peeked else next(self._iterator)

    def peek(self) -> list[Tree]:
        """A list of the next element, or an empty list."""
        self._peeked = self._peeked or list(islice(self._iterator, 1))
        return self._peeked


@final
class _RemainingIndices:
    """The indices of a sampler after the first `count`.

    The sampler draws as if it were read from the beginning.
    """

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)


def is_map_style(dataset: Any) -> bool:
    """Whether it is a map-style dataset: single elements, read by their index."""
    return isinstance(dataset, Dataset) and not isinstance(
        dataset, (IterableDataset, DataLoader)
    )


def _is_plain(dataset: Any) -> bool:
    """Whether it is a loader that iterates as torch's `DataLoader` does."""
    return (
        isinstance(dataset, DataLoader)
        and type(dataset).__iter__ is DataLoader.__iter__
    )


def _streams(dataset: Any) -> bool:
    """Whether it is a loader over an iterator, which can be read only once."""
    return isinstance(dataset, DataLoader) and isinstance(dataset.dataset, Iterator)


def _samples(loader: DataLoader[Any]) -> Iterator[Tree]:
    """Elements like those of a loader, loaded without workers.

    If they are batches, they have only one row.
    """
    batches = loader.batch_sampler is not None
    if isinstance(loader.dataset, IterableDataset):
        samples = iter(loader.dataset)
    else:
        indices = (
            chain.from_iterable(loader.batch_sampler or ())
            if batches
            else iter(loader.sampler)
        )
        samples = (loader.dataset[index] for index in indices)
    return (loader.collate_fn([sample] if batches else sample) for sample in samples)


def _copy_loader(
    loader: DataLoader[Any], indices: Iterable[Any], **changed: Any
) -> DataLoader[Any]:
    """A loader like `loader` that yields the batches of `indices`.

    It yields samples if `loader` does not make batches.
    """
    chosen = (
        {"sampler": indices, "batch_size": None}
        if loader.batch_sampler is None
        else {"batch_sampler": indices}
    )
    given = {
        name: getattr(loader, name)
        for name in signature(DataLoader).parameters
        if name not in _OF_INDICES
    }
    return DataLoader(**{**given, **chosen, **changed})


def _generators(*loaders: Any) -> list[torch.Generator]:
    """torch's default generator, and the generators of loaders and what they read.

    They are attributes of loaders, their samplers and iterable datasets.
    """
    parts = list(loaders)
    found = {id(torch.default_generator): torch.default_generator}
    for part in parts:  # the loop appends to this list
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if isinstance(value, torch.Generator):
                found[id(value)] = value
                continue
            draws = name in _OF_THE_ORDER or isinstance(
                value, (Sampler, IterableDataset, DataLoader)
            )
            if draws and not any(value is known for known in parts):
                parts.append(value)
    return list(found.values())


def _set_states(
    generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]
) -> None:
    """Sets the states of generators; does nothing if there are no states."""
    for generator, state in zip(generators, states, strict=False):
        # torch.load(map_location=...) may have moved the state to a device.
        generator.set_state(state.cpu())


@contextmanager
def _keeping_states(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """A block after which generators have the same states as before."""
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        _set_states(generators, before)


_OF_THE_ORDER = ("sampler", "batch_sampler")
# The options of a loader that say which indices it reads.
_OF_INDICES = {"batch_size", "shuffle", *_OF_THE_ORDER, "drop_last"}
