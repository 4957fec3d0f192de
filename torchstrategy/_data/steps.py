"""Which rows of what is read go to which worker and which replica.

It also says their shapes and dtypes.

Either a batch is split into a part for each replica, or each replica gets an element of
its own. Nothing is copied to another device here. The parts of a tensor share its
memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base import row_errors
from torchstrategy._base.context import is_accelerator
from torchstrategy._base.distributed_values import ABSENT, PerReplica, Unmade
from torchstrategy._base.errors import plural
from torchstrategy._base.torch_internals import TreeSpec
from torchstrategy._base.tree import (
    PLAIN_LEAVES,
    Unlike,
    map_leaves,
    tree_flatten,
    zip_leaves,
)
from torchstrategy._base.types import Device, Tree
from torchstrategy._data import batch_types
from torchstrategy._data.layouts import refuse_samples, warn_of_layout
from torchstrategy._data.options import AutoShardPolicy, InputOptions
from torchstrategy._data.same_rows import Read, read_of
from torchstrategy._data.shards import Shard
from torchstrategy._data.source import Source
from torchstrategy._group.workers import Workers


@final
class Parts(list[Tree]):
    """A list of the parts of one leaf, one for each replica.

    In a process whose replicas all have no rows, there is one more: what the first
    replica has as an understudy.
    """


@final
class SplitBatch(NamedTuple):
    """An element of a dataset that was split among the replicas.

    A strategy of one replica gets it whole.
    """

    # Each leaf is `Parts`, or a single value for all replicas; or the element is the
    # one part.
    leaves: list[Tree]
    # None: the strategy has one replica, which gets the whole element.
    spec: TreeSpec | None
    rows: tuple[int, ...]  # how many rows each replica got
    # The same for the replicas of all workers, if that is known.
    rows_of_all: tuple[int, ...] | None = None
    read: Read | None = None  # what the workers compare of it

    def parts(self) -> list[list[Tree]]:
        """For each replica, its parts of the leaves that were split.

        The first replica also gets what it can spare for others.
        """
        count = len(self.rows)
        of_replicas: list[list[Tree]] = [[] for _ in range(count)]
        spare: list[Tree] = []
        for leaf in self.leaves:
            if type(leaf) is Parts:
                for r in range(count):
                    of_replicas[r].append(leaf[r])
                spare += leaf[count:]
        of_replicas[0] += spare
        return of_replicas

    def assemble(self, arrived: Sequence[Sequence[Tree]]) -> Tree:
        """The element, with a per-replica value in place of each leaf that was split.

        The value consists of the copied parts.
        """
        if self.spec is None:
            return arrived[0][0]
        count = len([leaf for leaf in self.leaves if type(leaf) is Parts])
        columns = zip(*(parts[:count] for parts in arrived), strict=True)
        with_spare = itertools.zip_longest(columns, arrived[0][count:])
        leaves: list[Tree] = []
        for leaf in self.leaves:
            if type(leaf) is Parts:
                column, spare = next(with_spare)
                leaf = PerReplica(
                    column,
                    self.rows,
                    spare,
                    rows_of_all=self.rows_of_all,
                    read=self.read,
                )
            leaves.append(leaf)
        return self.spec.unflatten(leaves)


def split_equally(replicas: int, rows: int) -> list[slice]:
    """Contiguous parts of ceil(rows / replicas) rows.

    The last parts may be smaller or empty.
    """
    size = -(-rows // replicas)
    return [
        slice(min(r * size, rows), min((r + 1) * size, rows)) for r in range(replicas)
    ]


def split_in_proportion(shares: Sequence[float]) -> Callable[[int], list[slice]]:
    """Contiguous parts with sizes in the proportion of `shares`.

    They are as close to it as whole rows allow.
    """
    sums = list(itertools.accumulate(shares))
    parts = [part / sums[-1] for part in sums]

    def slices(rows: int) -> list[slice]:
        # 1e-9 is subtracted so that a rounding error just above a whole number does not
        # add a row.
        ends = [0, *(math.ceil(rows * part - 1e-9) for part in parts)]
        return list(map(slice, ends, ends[1:]))

    return slices


@final
class Share(NamedTuple):
    """Which rows of a global batch belong to the replicas of one worker.

    Attributes:
        slices: For each replica of this worker, its rows.
        borrowed: The rows on which a worker without rows runs the step, which are those
            of replica 0 of all; see Note [Why a worker without rows runs the step] in
            `_group/participants`. None: this worker has rows, or there are none.
        rows_of_all: How many rows each replica of all workers has. None: each worker
            has a batch of its own.
    """

    slices: list[slice]
    borrowed: slice | None
    rows_of_all: tuple[int, ...] | None

    @property
    def loaded(self) -> slice:
        """The rows that this worker reads, which stand together."""
        return self.borrowed or slice(
            self.slices[0].start, max(piece.stop for piece in self.slices)
        )

    def within_loaded(self) -> Share:
        """The same, with rows counted from the first one that this worker reads."""
        if self.borrowed is not None:
            borrowed = slice(0, self.borrowed.stop - self.borrowed.start)
            return Share([slice(0, 0)] * len(self.slices), borrowed, self.rows_of_all)
        start = self.loaded.start
        own = [slice(piece.start - start, piece.stop - start) for piece in self.slices]
        return Share(own, None, self.rows_of_all)


def share_rule(
    options: InputOptions, replicas: int, workers: Workers
) -> Callable[[int], Share]:
    """A function that returns the share of this worker in a batch of so many rows.

    Raises:
        ValueError: If `options` say how many rows another number of replicas gets.
    """
    is_own = options.experimental_auto_shard_policy is AutoShardPolicy.OFF
    everyone, first = (
        (replicas, 0)
        if is_own
        else (replicas * workers.count, replicas * workers.index)
    )
    sizes = options.row_shares
    if sizes is not None and len(sizes) != everyone:
        raise row_errors.row_shares_error(sizes, everyone)
    cut = (
        functools.partial(split_equally, everyone)
        if sizes is None
        else split_in_proportion(sizes)
    )

    def share(total: int) -> Share:
        of_all = cut(total)
        slices = of_all[first : first + replicas]
        has_rows = any(piece.stop > piece.start for piece in slices)
        borrowed = None if has_rows or not total else of_all[0]
        rows_of_all = None
        if not is_own:
            rows_of_all = tuple([piece.stop - piece.start for piece in of_all])
        return Share(slices, borrowed, rows_of_all)

    return share


def _is_leaf_or_empty(value: Any) -> bool:
    """Whether a value is a leaf, or an empty list or tuple.

    Where one element has an empty list, another one may have rows.
    """
    return batch_types.is_leaf(value) or (type(value) in (list, tuple) and not value)


def _make_empty(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        return leaf.new_empty(0)
    return _take_part(leaf, slice(0, 0))


def _take_part(leaf: Any, rows: slice) -> Any:
    """Some rows of a leaf.

    A part without rows of a registered type is made only if somebody reads it.

    The type may not allow a value without rows.
    """
    if rows.start != rows.stop or not batch_types.is_registered_within(leaf):
        return batch_types.take_rows(leaf, rows)

    def make() -> Any:
        try:
            return batch_types.take_rows(leaf, slice(0, 0))
        except Exception as error:
            raise row_errors.no_empty_part_error(type(leaf).__name__, error) from error

    return Unmade(make)


@final
@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor.

    Args:
        shape: The sizes of the dimensions; None for a size that is not known
            beforehand.
        dtype: The dtype of the elements.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
        >>> strategy.experimental_distribute_dataset(loader).element_spec
        TensorSpec(shape=(None, 3), dtype=torch.float32)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/TensorSpec
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


@final
@dataclass(frozen=True)
class PerReplicaSpec:
    """The spec of a per-replica value: what each replica gets.

    Args:
        value_specs: For each replica, a `TensorSpec`; if the value is no tensor, its
            type.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> loader = torch.utils.data.DataLoader(
        ...     torch.ones(8, 3), batch_size=4, drop_last=True
        ... )
        >>> spec = strategy.experimental_distribute_dataset(loader).element_spec
        >>> spec.value_specs[1]
        TensorSpec(shape=(2, 3), dtype=torch.float32)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedDataset#element_spec
    """

    value_specs: tuple[TensorSpec | type, ...]


class Splitter(ABC):
    """Splits the elements that are read from sources for one step among the replicas.

    Args:
        sources: The sources that are read in turn.
        replicas: How many replicas there are in this process.
        lists_are_rows: Whether each item of a list is a row. None: the user has not
            said.
        workers: The processes that train together.

    Attributes:
        elements_of_step: How many elements are read for a step: one for each replica,
            or one for all.
        is_alone: Whether one replica gets every element whole.
        reads_its_own: Whether this worker reads data that other workers do not have,
            and may come to its end before them.
        is_to_be_seen: Whether the spec has to be taken from the next element that is
            read, since none can be looked at later.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        replicas: int,
        lists_are_rows: bool | None,
        workers: Workers,
    ) -> None:
        self.sources = tuple(sources)
        self.replicas = self.elements_of_step = replicas
        self.is_alone = replicas == 1 and workers.count == 1
        self.reads_its_own = workers.count > 1
        self.workers = workers
        self._lists_are_rows = lists_are_rows
        self._has_seen_layout = False
        self._spec: Tree = None
        self.is_to_be_seen = any(source.shows_each_once for source in sources)

    def __str__(self) -> str:
        return f"{self.sources[0]}, for {plural(self.replicas, 'replica')}"

    def spec(self) -> Tree:
        """What the elements of the distributed dataset are made of."""
        if self._spec is None:
            with self.sources[0].reading():
                elements = [source.first() for source in self.sources]
                self.see(
                    self.split_batch(
                        elements * (self.elements_of_step // len(elements)),
                        are_read=False,
                    )
                )
        return self._spec

    def split_batch(
        self, elements: Sequence[Tree], are_read: bool = True
    ) -> SplitBatch:
        """Splits the elements of one step among the replicas.

        Lists count as rows if the user has said so.

        Args:
            elements: The elements.
            are_read: Whether they were read for a step, and not only to be looked at:
                then they have fewer samples.
        """
        if self.is_alone:
            return SplitBatch([Parts(elements)], None, (1,))  # it need not have rows
        if self._lists_are_rows:
            elements = [
                batch_types.exchange_lists(element, list, batch_types.Rows)
                for element in elements
            ]
        if are_read and self.may_look:
            # A worker that loads only samples of its own compares their number with the
            # rows of each batch.
            for element in elements:
                if element is not ABSENT and type(element) is not Shard:
                    refuse_samples(element, self.sources[0].samples)
        split_batch = self.split(elements)
        self._has_seen_layout |= are_read
        return split_batch

    @property
    def may_look(self) -> bool:
        """Whether to check that the first dimension of tensors has rows.

        The first batch is checked, unless the user has said how lists are split.
        """
        return (
            not self._has_seen_layout
            and self._lists_are_rows is not False
            and not self.sources[0].makes_columns
        )

    def see(self, split_batch: SplitBatch) -> None:
        """Takes the spec from an element."""
        rows = self.rows()

        def specs(leaf: Tree) -> Tree:
            if type(leaf) is not Parts:
                return self._spec_of_one(leaf, None)
            # A part without rows may not be made yet. Its spec is that of another one.
            made = next(piece for piece in leaf if type(piece) is not Unmade)
            shown = [made if type(piece) is Unmade else piece for piece in leaf]
            return PerReplicaSpec(tuple(map(self._spec_of_one, shown, rows)))

        if split_batch.spec is None:
            (element,) = split_batch.leaves[0]
            self._spec = map_leaves(
                lambda leaf: self._spec_of_one(leaf, rows[0]),
                element,
                batch_types.is_leaf,
            )
        else:
            self._spec = split_batch.spec.unflatten(
                [specs(leaf) for leaf in split_batch.leaves]
            )
        self.is_to_be_seen = False

    def _spec_of_one(self, value: Any, rows: int | None) -> TensorSpec | type:
        """The spec of the values of one leaf for one replica.

        Args:
            value: One such value.
            rows: How many rows such values have, if they have rows. None: the number is
                not known beforehand.
        """
        tensor = batch_types.apply_to_tensors(value, lambda tensor: tensor)
        if not isinstance(tensor, torch.Tensor):
            return type(value)
        # A size of a nested tensor that differs from row to row is no integer.
        shape: list[int | None] = [
            size if isinstance(size, int) else None for size in tensor.shape
        ]
        if self.sources[0].is_batched and batch_types.has_rows(value):
            shape[0] = rows
        return TensorSpec(tuple(shape), tensor.dtype)

    def __len__(self) -> int:
        """How many steps an epoch has."""
        elements = max(map(len, self.sources)) * len(self.sources)
        return -(-elements // self.elements_of_step)

    @abstractmethod
    def rows(self) -> Sequence[int | None]:
        """How many rows each replica gets in every step, if this is certain."""

    @abstractmethod
    def split(self, elements: Sequence[Tree]) -> SplitBatch:
        """Splits the elements of one step among the replicas.

        A replica whose data has run out (`ABSENT`) gets no rows.

        Raises:
            ValueError: If nothing has rows and something is to be split, two leaves of
                an element have different numbers of rows, or two elements differ in
                structure.
            TypeError: If it is not known how to cut a leaf.
        """


@final
class SplitSteps(Splitter):
    """Splits each element into a part for each replica.

    If there is only one replica, it gets the whole element.

    Args:
        source: The source of batches, of the global size unless `options` say that each
            worker has its own.
        devices: The device of each replica.
        options: What the user has said about the dataset.
        workers: The processes that train together.
    """

    def __init__(
        self,
        source: Source,
        devices: Sequence[Device],
        options: InputOptions,
        workers: Workers,
    ) -> None:
        super().__init__([source], len(devices), options.lists_are_rows, workers)
        self.elements_of_step = 1
        self.reads_its_own &= (
            options.experimental_auto_shard_policy is AutoShardPolicy.OFF
        )
        self._is_even = options.row_shares is None
        self._share_of = share_rule(options, len(devices), workers)
        # Where parts are moved to devices, each replica gets its own copy of every
        # tensor, also of one without rows.
        self._is_moved = options.experimental_fetch_to_device and any(
            map(is_accelerator, devices)
        )

    def rows(self) -> Sequence[int | None]:
        rows = self.sources[0].rows
        if (
            rows is None
            or self.workers.count > 1
            or (self._is_even and rows % self.replicas)
        ):
            return [None] * self.replicas
        return [piece.stop - piece.start for piece in self._share_of(rows).slices]

    def split(self, elements: Sequence[Tree]) -> SplitBatch:
        (element,), total, read = elements, None, None
        if type(element) is Shard:
            element, read = element
            total = len(read.rows)
        if self.may_look and warn_of_layout(element, self.sources[0].samples):
            self._has_seen_layout = True  # so that the warning comes only once
        rows = batch_types.rows_of(element)
        if rows is None:
            raise row_errors.unbatched_error(self.replicas)
        share = self._share_of(rows if total is None else total)
        if read is None and self.workers.count > 1 and not self.reads_its_own:
            read = read_of(element, rows)
        if total is not None:
            samples = share.loaded.stop - share.loaded.start
            if rows != samples:
                raise row_errors.samples_are_no_rows_error(rows, samples)
            share = share.within_loaded()
        counts = tuple(piece.stop - piece.start for piece in share.slices)
        pieces = (
            share.slices if share.borrowed is None else [*share.slices, share.borrowed]
        )

        def parts(leaf: Tree) -> Tree:
            if batch_types.has_rows(leaf):
                return Parts([_take_part(leaf, piece) for piece in pieces])
            tensors = batch_types.tensors_within(leaf)
            is_apart = any(
                self._is_moved or is_accelerator(tensor.device) for tensor in tensors
            )
            return Parts([leaf] * len(pieces)) if is_apart else leaf

        leaves, spec = tree_flatten(element, batch_types.is_leaf)
        return SplitBatch(
            list(map(parts, leaves)), spec, counts, share.rows_of_all, read
        )


@final
class OneForEach(Splitter):
    """Gives each replica an element of its own.

    The replicas read one source in turn, or each its own source.
    """

    def rows(self) -> Sequence[int | None]:
        # The data may run out in a step.
        return [self.sources[0].rows if self.is_alone else None] * self.replicas

    def split(self, elements: Sequence[Tree]) -> SplitBatch:
        first = next(element for element in elements if element is not ABSENT)
        rows: list[int] = []
        filled: list[Tree] = []
        for element in elements:
            if element is ABSENT:
                rows.append(0)
                filled.append(map_leaves(_make_empty, first, batch_types.is_leaf))
            else:
                count = batch_types.rows_of(element)
                # An element without rows is one example.
                rows.append(1 if count is None else count)
                filled.append(element)
        try:
            columns, spec = zip_leaves(filled, _is_leaf_or_empty)
        except Unlike as unlike:
            other, path = unlike.args
            raise ValueError(
                f"The elements that replicas 0 and {other} are given in one step "
                f"differ in structure: {path}. All that a dataset yields has to be "
                "alike."
            ) from None
        leaves: list[Tree] = []
        for column in columns:
            leaves.append(
                Parts(
                    [
                        batch_types.exchange_lists(part, batch_types.Rows, list)
                        for part in column
                    ]
                )
            )
        return SplitBatch(leaves, spec, tuple(rows))


def are_in_host_memory(element: Tree) -> bool:
    """Whether an element clearly is numbers, or tensors in the memory of the CPU."""
    items: Iterable[Any] = (element,)
    if type(element) is dict:
        items = element.values()
    elif type(element) in (list, tuple):
        items = element
    for item in items:
        is_near = (
            item.is_cpu if type(item) is torch.Tensor else type(item) in PLAIN_LEAVES
        )
        if not is_near:
            return False
    return True
