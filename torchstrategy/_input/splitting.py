"""Which rows of a batch go to which replica.

Either a batch is split into a part for each replica, or each replica gets an element of its own. Nothing is copied to
another device here. The parts of a tensor share its memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy._core.devices import is_accelerator
from torchstrategy._core.distributed_values import ABSENT, PerReplica, Unmade
from torchstrategy._core.errors import described
from torchstrategy._core.torch_internals import TreeSpec
from torchstrategy._core.tree import LEAF, first_unlike, map_leaves, tree_flatten, zip_leaves
from torchstrategy._core.types import Tree
from torchstrategy._input.batch_types import (
    has_rows,
    is_leaf,
    is_registered_within,
    named_counts,
    row_counts,
    rows_as_lists,
    taken,
    tensors_within,
)

Sizes = Callable[[int], list[slice]]
"""A function from the number of rows of a batch to the rows of each replica."""


@final
class Parts(list[Tree]):
    """A list of the parts of one leaf, one for each replica."""


@final
class SplitBatch(NamedTuple):
    """An element of a dataset that was split among the replicas. A strategy of one replica gets it whole."""

    leaves: list[Tree]  # each leaf is `Parts`, or a single value for all replicas; or the element is the one part
    spec: TreeSpec
    rows: tuple[int, ...]  # how many rows each replica got

    def parts(self) -> list[list[Tree]]:
        """For each replica, its parts of the leaves that were split."""
        columns = [leaf for leaf in self.leaves if type(leaf) is Parts]
        return [[column[r] for column in columns] for r in range(len(self.rows))]

    def assembled(self, arrived: Sequence[Sequence[Tree]]) -> Tree:
        """The element, with a per-replica value of the copied parts in place of each leaf that was split."""
        if len(self.rows) == 1:
            return arrived[0][0]
        columns = zip(*arrived, strict=True)
        leaves = [PerReplica(next(columns), self.rows) if type(leaf) is Parts else leaf for leaf in self.leaves]
        return self.spec.unflatten(leaves)


def whole(element: Tree) -> SplitBatch:
    """An element for a strategy of one replica. It need not have rows."""
    return SplitBatch([Parts([element])], LEAF, (1,))


def in_equal_parts(replicas: int) -> Sizes:
    """Contiguous parts of ceil(rows / replicas) rows; the last ones may be smaller or empty."""

    def slices(rows: int) -> list[slice]:
        size = -(-rows // replicas)
        return [slice(min(r * size, rows), min((r + 1) * size, rows)) for r in range(replicas)]

    return slices


def in_proportion(shares: Sequence[float]) -> Sizes:
    """Contiguous parts whose sizes are in the proportion of `shares`, as nearly as whole rows allow."""
    sums = list(itertools.accumulate(shares))
    parts = [part / sums[-1] for part in sums]

    def slices(rows: int) -> list[slice]:
        # 1e-9 is subtracted so that a rounding error just above a whole number does not add a row.
        ends = [0, *(math.ceil(rows * part - 1e-9) for part in parts)]
        return list(map(slice, ends, ends[1:]))

    return slices


def split(batch: Tree, sizes: Sizes, replicas: int, *, is_moved: bool) -> SplitBatch:
    """Splits a batch into a part for each replica.

    Args:
        batch: A batch of a loader.
        sizes: Returns the rows of each replica.
        replicas: How many replicas there are.
        is_moved: Whether the parts will be moved to devices. Then each replica gets its own copy of every tensor, also
            of a tensor without rows.

    Raises:
        ValueError: If nothing has rows, or two leaves have different numbers of them.
        TypeError: If it is not known how to cut a leaf.
    """
    rows = _rows(batch)
    if rows is None:
        raise ValueError(
            f"An element of the dataset has no rows to deal out to {replicas} replicas: it is not batched. Batch the "
            "dataset with the global batch size, as in torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    slices = sizes(rows)

    def parts(leaf: Tree) -> Tree:
        if has_rows(leaf):
            return Parts([_part(leaf, piece) for piece in slices])
        is_apart = any(is_moved or is_accelerator(tensor.device) for tensor in tensors_within(leaf))
        return Parts([leaf] * replicas) if is_apart else leaf

    leaves, spec = tree_flatten(batch, is_leaf)
    return SplitBatch(list(map(parts, leaves)), spec, tuple(piece.stop - piece.start for piece in slices))


def joined(elements: Sequence[Tree]) -> SplitBatch:
    """Puts an element for each replica together. A replica for which the data has run out (`ABSENT`) gets no rows.

    Raises:
        ValueError: If the elements differ in structure, or the leaves of one have different numbers of rows.
        TypeError: If a leaf is of no known kind.
    """
    first = next(element for element in elements if element is not ABSENT)
    counts = [0 if element is ABSENT else _rows(element) for element in elements]
    filled = [map_leaves(_without_rows, first, is_leaf) if element is ABSENT else element for element in elements]
    try:
        columns, spec = zip_leaves(filled, _is_leaf_or_empty)
    except ValueError:
        other, path = first_unlike(filled, _is_leaf_or_empty)
        raise ValueError(
            f"The elements that replicas 0 and {other} are given in one step differ in structure: {path}. All that a "
            "dataset yields has to be alike."
        ) from None
    rows = tuple(1 if count is None else count for count in counts)  # an element without rows is one example
    return SplitBatch([Parts(map(rows_as_lists, column)) for column in columns], spec, rows)


def _is_leaf_or_empty(value: Any) -> bool:
    """Whether a value is a leaf, or an empty list or tuple: another element may have rows in its place."""
    return is_leaf(value) or (type(value) in (list, tuple) and not value)


def _rows(batch: Tree) -> int | None:
    """The number of rows that all values of a batch have in common; None if no value has rows.

    Raises:
        ValueError: If two of them have different numbers of rows.
        TypeError: If it is not known how to deal one out.
    """
    counts = row_counts(batch)
    if counts is not None and len(counts) < 2:
        return next(iter(counts), None)
    (first, rows), *others = named_counts(batch)
    name, count = next((name, count) for name, count in others if count != rows)
    raise ValueError(
        f"The leaves of a batch have different numbers of rows: {first} has {rows} and {name} has {count}. "
        "Cut into pieces they would no longer belong together. Give each as many rows; or make what is not per row a "
        "tensor without dimensions, or, of a list, a dict. Where each item of a list is a row, as with the boxes of "
        "images, say InputOptions(lists_are_rows=True); or make the batch an object of a class of your own, and say "
        "how it is cut: torchstrategy.register_batch_type(...)."
    )


def _without_rows(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        return leaf.new_empty(0)
    return _part(leaf, slice(0, 0))


def _part(leaf: Any, rows: slice) -> Any:
    return _unmade(leaf) if rows.start == rows.stop and is_registered_within(leaf) else taken(leaf, rows)


def _unmade(leaf: Any) -> Unmade:
    """A placeholder for a part without rows. The user's function is called for it only if somebody reads the part.

    The type of the value may not allow a value without rows.
    """

    def make() -> Any:
        try:
            return taken(leaf, slice(0, 0))
        except Exception as error:
            raise ValueError(
                f"A replica was dealt no rows, and there is no {type(leaf).__name__} without rows to give it: "
                f"{described(error)}. Leave out RunOptions(run_empty_replicas=True), and such a replica sits the step "
                "out; or let the take function that the type was registered with make one for slice(0, 0)."
            ) from error

    return Unmade(make)
