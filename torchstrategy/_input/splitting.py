"""Which rows go to which replica: a batch is cut into a piece for each, or each is given an element of its own.

Nothing is moved here. The pieces of a tensor share its memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy._core.devices import is_accelerator
from torchstrategy._core.distributed_values import ABSENT, PerReplica, Unmade
from torchstrategy._core.errors import described
from torchstrategy._core.torch_internals import TreeSpec
from torchstrategy._core.tree import first_unlike, map_leaves, tree_flatten, unflatten_like, zip_leaves
from torchstrategy._core.types import Tree
from torchstrategy._input.batch_types import (
    counts_within,
    cut,
    is_leaf,
    is_registered_within,
    named_counts,
    rows_as_lists,
    taken,
    tensors_within,
)

Sizes = Callable[[int], list[slice]]
"""The rows of each replica, of a number of rows."""


@final
class Parts(list[Tree]):
    """What each replica gets of one leaf."""


@final
class Whole(NamedTuple):
    """An element of a dataset for a lone replica, which needs no rows."""

    element: Tree

    def parts(self) -> list[list[Tree]]:
        """What the replica is given: one piece, in its containers."""
        return [[self.element]]

    def assembled(self, arrived: Sequence[Sequence[Tree]]) -> Tree:
        """The element, once it is there."""
        return arrived[0][0]


@final
class SplitBatch(NamedTuple):
    """An element of a dataset, dealt out."""

    leaves: list[Tree]  # each of them `Parts`, or one thing for all replicas
    spec: TreeSpec
    rows: tuple[int, ...]  # how many each replica got
    has_rows: bool = False  # whether there are `Rows` in the pieces, which are lists to the user

    def parts(self) -> list[list[Tree]]:
        """What each replica is given of the leaves that are in pieces."""
        columns = [leaf for leaf in self.leaves if type(leaf) is Parts]
        return [[column[r] for column in columns] for r in range(len(self.rows))]

    def assembled(self, arrived: Sequence[Sequence[Tree]]) -> Tree:
        """The element, with a per-replica value in place of its pieces, once those are there."""
        columns: Iterator[Sequence[Tree]] = zip(*arrived, strict=True)
        if self.has_rows:
            columns = iter([list(map(rows_as_lists, column)) for column in columns])
        leaves = [PerReplica(next(columns), self.rows) if type(leaf) is Parts else leaf for leaf in self.leaves]
        return unflatten_like(leaves, self.spec)


def in_equal_parts(replicas: int) -> Sizes:
    """Contiguous pieces of ceil(rows / replicas) rows; the last ones may be smaller or empty."""

    def slices(rows: int) -> list[slice]:
        size = -(-rows // replicas)
        return [slice(min(r * size, rows), min((r + 1) * size, rows)) for r in range(replicas)]

    return slices


def in_proportion(shares: Sequence[float]) -> Sizes:
    """Contiguous pieces, each as near to its share as whole rows allow."""
    sums = list(itertools.accumulate(shares))
    parts = [part / sums[-1] for part in sums]

    def slices(rows: int) -> list[slice]:
        # What is over a whole row by rounding only is not over it.
        ends = [0, *(math.ceil(rows * part - 1e-9) for part in parts)]
        return list(map(slice, ends, ends[1:]))

    return slices


def split(batch: Tree, sizes: Sizes, replicas: int, *, is_moved: bool) -> SplitBatch:
    """A batch, cut into a piece for each replica.

    Args:
        batch: What a loader yields.
        sizes: The rows of each replica.
        replicas: How many there are.
        is_moved: Whether the pieces will be moved to devices. Then each replica has its own of every tensor, also of
            one without rows.

    Raises:
        ValueError: If nothing has rows, or two leaves have different numbers of them.
        TypeError: If it is not known how to cut a leaf.
    """
    leaves, spec = tree_flatten(batch, is_leaf)
    counts = [counts_within(leaf) for leaf in leaves]
    rows = _agreed(counts, batch)
    if rows is None:
        raise ValueError(
            f"An element of the dataset has no rows to deal out to {replicas} replicas: it is not batched. Batch the "
            "dataset with the global batch size, as in torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    slices = sizes(rows)

    def parts(leaf: Tree, within: list[int] | None) -> Tree:
        if within:
            wanted = [_has_rows(piece) or not is_registered_within(leaf) for piece in slices]
            found = iter(cut(leaf, list(itertools.compress(slices, wanted))))
            return Parts([next(found) if is_wanted else _unmade(leaf) for is_wanted in wanted])
        is_apart = any(is_moved or is_accelerator(tensor.device) for tensor in tensors_within(leaf))
        return Parts([leaf] * replicas) if is_apart else leaf

    leaves = [parts(leaf, within) for leaf, within in zip(leaves, counts, strict=True)]
    return SplitBatch(leaves, spec, tuple(piece.stop - piece.start for piece in slices))


def joined(elements: Sequence[Tree]) -> SplitBatch:
    """An element for each replica, as it is; where the data has run out (`ABSENT`), one without rows.

    Raises:
        ValueError: If the elements differ in structure, or the leaves of one have different numbers of rows.
        TypeError: If a leaf is of no known kind.
    """
    first = next(element for element in elements if element is not ABSENT)
    rows = tuple(0 if element is ABSENT else _rows_of_element(element) for element in elements)
    filled = [map_leaves(_without_rows, first, is_leaf) if element is ABSENT else element for element in elements]
    try:
        columns, spec = zip_leaves(filled, _is_leaf_or_empty)
    except ValueError:
        other, path = first_unlike(filled, _is_leaf_or_empty)
        raise ValueError(
            f"The elements that replicas 0 and {other} are given in one step differ in structure: {path}. All that a "
            "dataset yields has to be alike."
        ) from None
    return SplitBatch([Parts(column) for column in columns], spec, rows)


def _is_leaf_or_empty(value: Any) -> bool:
    """Also a list, or a tuple, of no rows, as other elements have some in its place."""
    return is_leaf(value) or (type(value) in (list, tuple) and not value)


def _rows_of_element(element: Tree) -> int:
    """How many examples an element of a replica's own stands for; an unbatched one is one."""
    counts = [counts_within(leaf) for leaf in tree_flatten(element, is_leaf)[0]]
    rows = _agreed(counts, element)
    return 1 if rows is None else rows


def _agreed(counts: Sequence[list[int] | None], batch: Tree) -> int | None:
    """The one number of rows that all leaves have; None if none has any.

    Raises:
        ValueError: If two of them have different numbers of rows.
        TypeError: If it is not known how to deal one out.
    """
    distinct = {count for within in counts for count in within or ()}
    if len(distinct) < 2 and None not in counts:
        return next(iter(distinct), None)
    (first, rows), *others = named_counts(batch)
    name, count = next((name, count) for name, count in others if count != rows)
    raise ValueError(
        f"The leaves of a batch have different numbers of rows: batch{first} has {rows} and batch{name} has {count}. "
        "Cut into pieces they would no longer belong together. Give each as many rows; or make what is not per row a "
        "tensor without dimensions, or, of a list, a dict. Where each item of a list is a row, as with the boxes of "
        "images, say InputOptions(lists_are_rows=True); or make the batch an object of a class of your own, and say "
        "how it is cut: torchstrategy.register_batch_type(...)."
    )


def _without_rows(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        return leaf.new_empty(0)
    return _unmade(leaf) if is_registered_within(leaf) else taken(leaf, slice(0, 0))


def _has_rows(piece: slice) -> bool:
    return bool(piece.stop > piece.start)


def _unmade(leaf: Any) -> Unmade:
    """A piece of no rows, which there may not be: a function of the user's is asked for it if somebody gets it."""

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
