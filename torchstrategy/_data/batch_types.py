"""Which values of a batch have rows, how many, and how some of the rows are taken.

Containers are lists, tuples, named tuples, dicts, and all types that are registered
with torch's pytree. The first line of this table that fits a value in them says what
its rows are:

    a registered type               what the functions given to `register_batch_type`
                                    say
    a tensor, an array of numbers   the first dimension; without dimensions, it is a
                                    single value
    a sparse or a nested tensor     the first dimension, of the layouts `sparse_coo` and
                                    `jagged`; others are refused
    any other array                 the first dimension; it stays an array
    a `PackedSequence`              each sequence is a row
    a list of things without rows   each string, number or object in it is a row
    a tuple of strings              each string is a row: torch's default_collate makes
                                    such tuples of samples' strings
    a dataclass, a mapping          an object with parts, and the rows of the parts are
                                    its rows
    a number, a string, None        a single value: it has no rows, and every replica
                                    gets it
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, final

import numpy as np
import torch
from torch.nn.utils import rnn
from torch.utils.weak import WeakTensorKeyDictionary

from torchstrategy._base import row_errors, tree
from torchstrategy._base.errors import an, require_type
from torchstrategy._base.plain import PLAIN_TYPES
from torchstrategy._base.types import Device, Tree
from torchstrategy._data.arrays import has_dtype, share_memory

T = TypeVar("T")
TensorFn = Callable[[torch.Tensor], torch.Tensor]

# The types of single values, which have no rows, so that every replica gets them as
# they are.
SINGLE = (*PLAIN_TYPES, np.generic, torch.Size)


@final
@dataclass(frozen=True)
class Kind:
    """How to split the values of one type.

    Args:
        rows: Returns how many rows a value has. None: it is a single value, which every
            replica gets as it is.
        take: Returns a value that has only some of the rows.
        apply: Returns a value with `fn(tensor)` in place of each tensor.
    """

    rows: Callable[[Any], int] | None
    take: Callable[[Any, slice], Any]
    apply: Callable[[Any, TensorFn], Any]


def register_batch_type(
    cls: type[T],
    *,
    rows: Callable[[T], int] | None,
    take: Callable[[T, slice], T] | None = None,
    apply: Callable[[T, TensorFn], T] | None = None,
) -> None:
    """Says how batches of a type of your own are split among replicas.

    Register a type once, where it is defined. The registration also holds for
    subclasses of the type.

    Args:
        cls: The type. A value of it becomes one per-replica value, even if torch's
            pytree knows the type as a container.
        rows: `rows(value)` returns how many rows a value has. None: every replica gets
            the values as they are.
        take: `take(value, rows)` returns a value that has the rows of a slice, which
            has a start, a stop and no step. It is required if there are rows. With an
            empty slice it is called only if somebody needs a part without rows, as a
            run with `RunOptions(run_empty_replicas=True)` does.
        apply: `apply(value, fn)` returns a value in which each tensor `t` is replaced
            by `fn(t)`; the library uses it to move the tensors to a device. It must not
            change `value` itself. None: the values hold no tensors.

    Example:
        >>> class Sentences:
        ...     def __init__(self, words, scores):
        ...         self.words, self.scores = words, scores
        >>> torchstrategy.register_batch_type(
        ...     Sentences,
        ...     rows=lambda batch: len(batch.words),
        ...     take=lambda batch, rows: Sentences(
        ...         batch.words[rows], batch.scores[rows]
        ...     ),
        ...     apply=lambda batch, fn: Sentences(batch.words, fn(batch.scores)),
        ... )
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> source = [Sentences(["a", "b", "c"], torch.ones(3))]
        >>> for batch in strategy.experimental_distribute_dataset(source):
        ...     joined = lambda sentences: " ".join(sentences.words)
        ...     print(strategy.run(joined, args=(batch,)))
        PerReplica:{
          0: a b,
          1: c
        }

    Raises:
        TypeError: If `cls` is no class, or one whose values are distributed by rules of
            their own; or if one of the functions cannot be called.
        ValueError: If the type is registered already, or `take` is missing, or there
            for what has no rows.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.default_collate
    (which makes batches)
    """
    require_type(cls, type, "register_batch_type takes a class")
    if cls in _BUILT_IN:
        raise TypeError(
            f"How a {cls.__name__} is distributed is fixed: register a type of your "
            "own that holds it."
        )
    for name, function in (("rows", rows), ("take", take), ("apply", apply)):
        require_type(
            function,
            Callable | None,
            f"register_batch_type({cls.__name__}, {name}=...) takes a function",
        )
    if cls in _registered:
        raise ValueError(
            f"{cls.__name__} is registered already. Register a type once, where it is "
            "defined."
        )
    if (rows is None) != (take is None):
        raise ValueError(
            f"register_batch_type({cls.__name__}, ...) takes rows=... and take=lambda "
            "batch, rows: ..., which takes some of them; or neither of the two, and "
            "the values, which have no rows, are given whole."
        )
    checked = _check_functions(
        cls, rows or len, take or keep_whole, apply or keep_whole
    )
    _registered[cls] = (
        Kind(None, keep_whole, checked.apply) if rows is None else checked
    )


def _check_functions(
    cls: type,
    rows: Callable[[Any], Any],
    take: Callable[..., Any],
    apply: Callable[..., Any],
) -> Kind:
    """The kind of a type with a user's functions.

    Their results are checked, as an error would lose rows.
    """

    def told(name: str) -> str:
        return f"The {name} function that {cls.__name__} was registered with"

    def check_type(name: str, result: Any) -> Any:
        if not isinstance(result, cls):
            raise TypeError(
                f"{told(name)} returned {an(type(result).__name__)}, and not a "
                f"{cls.__name__}."
            )
        return result

    def count_rows(value: Any) -> int:
        count = rows(value)
        if not isinstance(count, SupportsIndex) or count < 0:  # type: ignore[operator]
            raise TypeError(
                f"{told('rows')} returned {count!r}, which is no number of rows."
            )
        return operator.index(count)

    def take_part(value: Any, part: slice) -> Any:
        result = check_type("take", take(value, part))
        found = count_rows(result)
        if found != part.stop - part.start:
            raise row_errors.taken_rows_error(told("take"), found, part)
        return result

    def apply_to_value(value: Any, fn: TensorFn) -> Any:
        return check_type("apply", apply(value, fn))

    return Kind(count_rows, take_part, apply_to_value)


def registration_of(value: Any) -> Kind | None:
    """The registration of the type of a value, or of a base class of this type.

    It is None if nobody has registered either.
    """
    if not _registered:
        return None
    return next(
        (_registered[cls] for cls in type(value).__mro__ if cls in _registered), None
    )


def keep_whole(value: T, _: object) -> T:
    """A value of which every replica gets the whole, or of which no tensor is moved.

    It has no rows, or no tensors.
    """
    return value


_registered: dict[type, Kind] = {}
_BUILT_IN = (
    object,
    torch.Tensor,
    np.ndarray,
    rnn.PackedSequence,
    list,
    tuple,
    dict,
    *SINGLE,
)


@final
class Rows(list[Any]):
    """A list in which each item is a row, whatever it is.

    With `lists_are_rows`, all lists of a batch become `Rows`.

    Some of the rows are a list again.
    """


def exchange_lists(batch: Tree, old: type[list[Any]], new: type[list[Any]]) -> Tree:
    """A batch with a `new` in place of each `old`: `Rows` for `list`, or back."""

    def change(leaf: Any) -> Any:
        return new(leaf) if type(leaf) is old else leaf

    return tree.map_within(
        change, batch, lambda value: type(value) is old or is_leaf(value), _is_record
    )


def kind_of(value: Any) -> Kind:
    """How to split a leaf of a batch; `_UNKNOWN` if the library does not know how."""
    # By far the most leaves are of this type, which nobody can register.
    if type(value) is torch.Tensor:
        return _of_tensor(value)
    if (registered := registration_of(value)) is not None:
        return registered
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        return _of_array(value)
    if isinstance(value, rnn.PackedSequence):
        return _PACKED
    if type(value) in (list, Rows) or _is_strings(value):
        return _LIST
    if tree.is_record(value):
        return _RECORD
    return _ONE_THING if isinstance(value, SINGLE) else _UNKNOWN


def is_leaf(value: Any) -> bool:
    """Whether a value is split as one leaf, though torch's pytree may look into it."""
    # The type decides for most values: nobody can register the first three types.
    kind = type(value)
    if kind is torch.Tensor:
        return True
    if kind is list:
        return bool(value) and not any(map(_makes_container, value))
    if kind is tuple:
        return _is_strings(value)
    return (
        isinstance(value, (rnn.PackedSequence, torch.Size))
        or registration_of(value) is not None
    )


def has_rows(leaf: Any) -> bool:
    """Whether a leaf, or a leaf in its parts, has rows."""
    return any(kind_of(part).rows is not None for part in _parts(leaf))


def rows_of(batch: Tree) -> int | None:
    """How many rows all values in a batch have; None if no value has rows.

    Raises:
        ValueError: If two of them have different numbers of rows.
        TypeError: If it is not known how to distribute one.
    """

    def name_of(index: int) -> str:  # which takes longer than to count the rows
        return list(tree.leaves_within(batch, "batch", is_leaf, _is_record))[index][0]

    # For each number of rows, the index of the first value that has it.
    counts: dict[int, int] = {}
    values = [
        part for leaf in tree.tree_flatten(batch, is_leaf)[0] for part in _parts(leaf)
    ]
    for index, value in enumerate(values):
        kind = kind_of(value)
        if kind is _UNKNOWN:
            what, to_do = _unknown(value)
            raise TypeError(
                f"{name_of(index)} is {what}, and it is not known how to distribute "
                f"its rows. {to_do}"
            )
        if kind.rows is not None:
            counts.setdefault(kind.rows(value), index)
    if len(counts) > 1:
        (rows, first), (other_rows, other), *_ = counts.items()
        raise row_errors.unequal_leaves_error(
            name_of(first), rows, name_of(other), other_rows
        )
    return next(iter(counts), None)


def is_registered_within(leaf: Any) -> bool:
    """Whether a leaf, or a leaf in its parts, is of a registered type.

    If so, a user's function takes its rows.
    """
    return any(registration_of(value) is not None for value in _parts(leaf))


def take_rows(leaf: Any, rows: slice) -> Any:
    """`leaf` with only some rows of all values in it that have rows."""
    return kind_of(leaf).take(leaf, rows)


def apply_to_tensors(leaf: Any, fn: TensorFn) -> Any:
    """`leaf` with `fn(tensor)` in place of each tensor.

    An array of numbers becomes a tensor.
    """
    if type(leaf) is torch.Tensor:  # a shortcut with the same result
        return leaf if _of_tensor(leaf) is _UNKNOWN else fn(leaf)
    return kind_of(leaf).apply(leaf, fn)


def apply_within(batch: Tree, fn: TensorFn) -> Tree:
    """`batch` with `fn(tensor)` in place of each tensor, in new containers."""
    return tree.map_leaves(functools.partial(apply_to_tensors, fn=fn), batch, is_leaf)


def tensors_within(leaf: Any) -> list[torch.Tensor]:
    """The tensors that `apply_to_tensors` would change."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    apply_to_tensors(leaf, note)
    return tensors


def move_to(batch: Tree, device: Device) -> Tree:
    """`batch` with each tensor on `device`. Arrays of numbers become tensors."""
    return apply_within(batch, lambda tensor: tensor.to(device))


def _parts(leaf: Any) -> list[Any]:
    """The leaves in the parts of a leaf that is a record.

    Of any other leaf, you get the leaf itself.
    """
    if not _is_record(leaf):
        return [leaf]
    try:
        return [
            part
            for held in tree.tree_flatten(tree.parts_of(leaf), is_leaf)[0]
            for part in _parts(held)
        ]
    except RecursionError:
        tree.check_depth(leaf)
        raise


def _is_record(leaf: Any) -> bool:
    return kind_of(leaf) is _RECORD


def _makes_container(value: Any) -> bool:
    """Whether a list with such an item is a container, and not a list of rows."""
    if type(value) in _SINGLE_TYPES:
        return False
    if type(value) is not torch.Tensor and tree.is_container(value):
        return True
    kind = kind_of(value)
    # A value of this type has rows all the same.
    is_unsplit = kind is _UNKNOWN and isinstance(value, (torch.Tensor, np.ndarray))
    return is_unsplit or kind.rows is not None or kind is _RECORD


def _is_strings(value: Any) -> bool:
    return (
        type(value) is tuple
        and bool(value)
        and all(isinstance(item, (str, bytes)) for item in value)
    )


def _unknown(value: Any) -> tuple[str, str]:
    """What a value is that the library cannot split, and what to do about it."""
    if isinstance(value, np.ndarray):
        to_do = (
            "torch has no such numbers: let the loader's collate_fn convert them, as "
            "by array.astype('float64')."
        )
        return f"an array of {value.dtype}", to_do
    if isinstance(value, torch.Tensor):
        to_do = (
            "Let the loader's collate_fn make a dense tensor, or one of layout "
            "torch.sparse_coo or torch.jagged."
        )
        return (
            f"a {'nested' if value.is_nested else 'sparse'} tensor ({value.layout})",
            to_do,
        )
    return an(type(value).__name__), (
        "Let the loader's collate_fn make tensors, or lists, tuples and dicts of them; "
        "or say how it is done: "
        f"torchstrategy.register_batch_type({type(value).__name__}, rows=..., "
        "take=..., apply=...)."
    )


def _of_tensor(tensor: torch.Tensor) -> Kind:
    if tensor.is_nested:
        return _NESTED if tensor.layout is torch.jagged else _UNKNOWN
    if tensor.layout is torch.sparse_coo:
        return _SPARSE if tensor.dim() else _TENSOR
    if tensor.layout is not torch.strided:
        return _UNKNOWN
    return _ROWS_OF_TENSOR if tensor.dim() else _TENSOR


def _apply_to_tensor(tensor: torch.Tensor, fn: TensorFn) -> torch.Tensor:
    return fn(tensor)


def _of_array(array: np.ndarray[Any, Any]) -> Kind:
    if array.ndim == 0:
        return _ONE_THING
    # A tensor has no mask.
    if array.dtype.kind not in "biufc" or isinstance(array, np.ma.MaskedArray):
        return _ROWS
    return _NUMBERS if has_dtype(array.dtype) else _UNKNOWN


def _tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor that shares the memory of an array.

    Where torch cannot share the memory, the tensor has a copy of it.
    """
    tensor = share_memory(array)
    return (
        torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
        if tensor is None
        else tensor
    )


def _apply_to_items(items: Sequence[Any], fn: TensorFn) -> Sequence[Any]:
    """The `apply` of a list of rows.

    They have no rows of their own, unless the list is one of `Rows`.
    """
    if all(type(item) in _SINGLE_TYPES for item in items):
        return items
    return [apply_within(item, fn) for item in items]


def _take_nested(tensor: Any, rows: slice) -> torch.Tensor:
    offsets, lengths = tensor.offsets(), tensor.lengths()
    jagged_dim = next(
        dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int)
    )
    first, end = int(offsets[rows.start]), int(offsets[rows.stop])
    return torch.nested.nested_tensor_from_jagged(
        tensor.values().narrow(jagged_dim - 1, first, end - first),
        _cut_once(offsets, rows, lambda: offsets[rows.start : rows.stop + 1] - first),
        None
        if lengths is None
        else _cut_once(lengths, rows, lambda: lengths[rows].clone()),
        jagged_dim,
    )


def _cut_once(
    sizes: torch.Tensor, rows: slice, cut: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """A part of the offsets or lengths of nested tensors.

    All tensors that share the whole `sizes` get the same part.

    torch takes two nested tensors to be of one shape, and adds them, only if they share
    the very same offsets. Parts of such tensors have to do so, too.
    """
    parts: dict[tuple[int, int], torch.Tensor] = _pieces_of_sizes.setdefault(sizes, {})
    key = (rows.start, rows.stop)
    return parts[key] if key in parts else parts.setdefault(key, cut())


def _take_packed(packed: rnn.PackedSequence, rows: slice) -> rnn.PackedSequence:
    # torch cannot pack an empty list, but its layers accept one step of no rows.
    if rows.start == rows.stop:
        return _apply_to_packed(packed, lambda tensor: tensor[:0])._replace(
            batch_sizes=packed.batch_sizes.new_zeros(1)
        )
    sequences = rnn.unpack_sequence(packed)[rows]
    return rnn.pack_sequence(sequences, enforce_sorted=packed.sorted_indices is None)


def _apply_to_packed(packed: rnn.PackedSequence, fn: TensorFn) -> rnn.PackedSequence:
    order, back = packed.sorted_indices, packed.unsorted_indices
    return rnn.PackedSequence(
        fn(packed.data),
        packed.batch_sizes,  # torch requires them on the CPU
        None if order is None else fn(order),
        None if back is None else fn(back),
    )


def _take_record(record: Any, rows: slice) -> Any:
    return tree.with_parts(
        record,
        lambda _, part: tree.map_leaves(
            lambda leaf: take_rows(leaf, rows), part, is_leaf
        ),
    )


# The keys are the whole tensor, then start and stop.
_pieces_of_sizes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# A set is quicker to check for each item of a long list.
_SINGLE_TYPES: frozenset[type] = frozenset(SINGLE)
_ONE_THING = Kind(None, keep_whole, keep_whole)
# A value that the library does not know how to split.
_UNKNOWN = Kind(None, keep_whole, keep_whole)
_ROWS = Kind(len, operator.getitem, keep_whole)
_LIST = Kind(len, operator.getitem, _apply_to_items)
_TENSOR = Kind(None, keep_whole, _apply_to_tensor)
_ROWS_OF_TENSOR = Kind(len, operator.getitem, _apply_to_tensor)
_SPARSE = Kind(
    len,
    lambda tensor, rows: tensor.narrow_copy(0, rows.start, rows.stop - rows.start),
    _apply_to_tensor,
)
_NESTED = Kind(lambda tensor: int(tensor.size(0)), _take_nested, _apply_to_tensor)
_NUMBERS = Kind(len, operator.getitem, lambda array, fn: fn(_tensor_over(array)))
_PACKED = Kind(
    lambda packed: int(packed.batch_sizes[0]), _take_packed, _apply_to_packed
)
_RECORD = Kind(
    None,
    _take_record,
    lambda record, fn: tree.with_parts(record, lambda _, part: apply_within(part, fn)),
)
