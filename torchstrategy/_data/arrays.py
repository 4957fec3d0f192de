"""Arrays in memory as a dataset of their rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import Dataset

from torchstrategy._base import row_errors
from torchstrategy._base.errors import an, plural
from torchstrategy._base.tree import leaves_within, tree_flatten
from torchstrategy._base.types import Tree

_Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"


@final
class ArrayDataset(Dataset[Tree]):
    """A map-style dataset of the rows of arrays.

    `Strategy.experimental_make_numpy_dataset` returns it.

    It has no batches. Give it to a `torch.utils.data.DataLoader`, which shuffles and
    batches it, with workers or without.

    An element has the containers of `numpy_input`, with a row in place of each array. A
    row is a tensor; if torch has no dtype for the array, as for strings, it is the item
    itself. Rows are not copied, but share the memory of their array. Where torch cannot
    share this memory, for example because it is read-only, each row is copied when it
    is read.

    Args:
        numpy_input: An array; or tuples, named tuples and dicts of arrays to any depth,
            with the same number of rows. A list of arrays is one array: they are
            stacked. Tensors may take the place of arrays.

    Example:
        >>> import numpy
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> numpy_input = {
        ...     "x": numpy.arange(6.0).reshape(3, 2),
        ...     "y": numpy.array([0, 1, 0]),
        ... }
        >>> dataset = strategy.experimental_make_numpy_dataset(numpy_input)
        >>> len(dataset), dataset[1]
        (3, {'x': tensor([2., 3.], dtype=torch.float64), 'y': tensor(1)})
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2)
        >>> next(iter(strategy.experimental_distribute_dataset(loader)))["y"]
        PerReplica:{
          0: tensor([0]),
          1: tensor([1])
        }

    Raises:
        ValueError: If arrays have no dimensions, differ in their numbers of rows, or
            cannot be stacked.
        TypeError: If something in `numpy_input` is no array.

    Source: https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/distribute/Strategy#experimental_make_numpy_dataset
    """

    def __init__(self, numpy_input: Tree) -> None:
        leaves = leaves_within(
            numpy_input, "numpy_input", _is_list, is_record=lambda leaf: False
        )
        named = [(name, _as_array(name, leaf)) for name, leaf in leaves]
        self._rows = _rows(named)
        self._columns: list[_Array] = []
        for _, array in named:
            shared = share_memory(array)
            self._columns.append(array if shared is None else shared)
        self._shape = tree_flatten(numpy_input, _is_list)[1]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Tree:
        index = operator.index(index)
        if not -self._rows <= index < self._rows:
            raise IndexError(
                f"Index {index} is out of range for a dataset of "
                f"{plural(self._rows, 'element')}."
            )
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tree]:
        """The elements at `indices`. A DataLoader calls this once for each batch."""
        # Row by row, so that nothing is copied. Indexing a whole column once is faster
        # for rows of less than about 4 kB, but takes twice as long for images.
        columns = [_rows_at(indices, column) for column in self._columns]
        return [self._shape.unflatten(list(row)) for row in zip(*columns, strict=True)]

    def __getstate__(self) -> tuple[int, Tree]:
        # Unpickling a TreeSpec gives a warning.
        return self._rows, self._shape.unflatten(list(self._columns))

    def __setstate__(self, state: tuple[int, Tree]) -> None:
        self._rows, columns = state
        self._columns, self._shape = tree_flatten(columns)


def _rows_at(indices: Sequence[int], column: _Array) -> Iterable[Any]:
    """Some rows of an array.

    Those of numbers are tensors: where torch cannot share their memory, each is copied.

    The array is not copied as a whole, since it may be larger than the memory, such as
    an array mapped from a file.
    """
    rows = map(column.__getitem__, indices)
    if isinstance(column, torch.Tensor) or not has_dtype(column.dtype):
        return rows
    native = column.dtype.newbyteorder("=")
    return (torch.from_numpy(np.array(row, dtype=native)) for row in rows)


def share_memory(array: _Array) -> torch.Tensor | None:
    """A tensor that shares the memory of an array; None if torch cannot share it.

    It cannot do so if the array is read-only, has negative strides, another byte order
    or items that are no numbers.
    """
    with suppress(TypeError, ValueError):
        return (
            torch.from_numpy(array)
            if isinstance(array, np.ndarray) and array.flags.writeable
            else None
        )
    return None


@functools.cache
def has_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether torch has a dtype for items of an array's dtype, in any byte order."""
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def _as_array(name: str, leaf: Tree) -> _Array:
    """The array of a leaf of `numpy_input`.

    If the leaf is a list of arrays, they are stacked.
    """
    if _is_list(leaf) and leaf:
        arrays: list[Any] = [
            _as_array(f"{name}[{i}]", item) for i, item in enumerate(leaf)
        ]
        for i, array in enumerate(arrays):
            if _kind(array) != _kind(arrays[0]):
                raise ValueError(
                    f"{name} is a list, so the arrays in it are stacked; but {name}[0] "
                    f"is {_describe(arrays[0])} and {name}[{i}] is {_describe(array)}. "
                    "Make them alike, or write a tuple if each has its own rows."
                )
        return (
            torch.stack(arrays)
            if isinstance(arrays[0], torch.Tensor)
            else np.stack(arrays)
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and a tensor has no mask. Write "
            f"{name}.filled(...)."
        )
    if not isinstance(leaf, (np.ndarray, torch.Tensor)):
        kind = "an empty list" if _is_list(leaf) else an(type(leaf).__name__)
        raise TypeError(
            f"{name} is {kind}, and has no rows. numpy_input is an array, or tuples "
            "and dicts of arrays, or lists of arrays to stack. Make one array of "
            "numbers or strings that belong together, as in numpy.array([1.0, 2.0])."
        )
    return leaf


def _kind(array: _Array) -> tuple[object, ...]:
    """The properties that arrays must have in common to be stacked."""
    # Strings of different lengths, and integers of different widths, have different
    # dtypes and can be stacked.
    return tuple(array.shape), array.dtype if isinstance(
        array, torch.Tensor
    ) else array.dtype.kind


def _describe(array: _Array) -> str:
    return f"{array.dtype} of shape {tuple(array.shape)}"


def _rows(named: Sequence[tuple[str, _Array]]) -> int:
    """How many rows the arrays have."""
    if not named:
        raise row_errors.no_arrays_error()
    for name, array in named:
        if not array.ndim:
            raise row_errors.rowless_array_error(name)
        first_name, first = named[0]
        if len(array) != len(first):
            raise row_errors.unequal_arrays_error(
                first_name, len(first), name, len(array)
            )
    return len(named[0][1])


def _is_list(value: object) -> bool:
    return isinstance(value, list)
