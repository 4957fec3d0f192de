"""What a batch may be made of: which values have rows, how many, and how some of them are taken.

Lists, tuples, named tuples, dicts, and what else torch's pytree knows, are containers. What is in them is, in this
order:

    a registered type               as `register_batch_type` was told
    a tensor, an array of numbers   its first dimension are its rows; without dimensions it is one thing
    any other array                 its first dimension are its rows; it stays an array
    a `PackedSequence`              a row is a sequence
    a list of things without rows   strings, numbers, objects: each of them is a row
    a dataclass, a mapping          an object with parts, which have its rows
    a number, a string, None        one thing
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch.nn.utils import rnn

from torchstrategy._errors import an
from torchstrategy._torch import sparse_indices, sparse_values
from torchstrategy._tree import is_container, leaves_with_names, map_leaves, tree_flatten
from torchstrategy._types import Device, Tree

T = TypeVar("T")
TensorFn = Callable[[torch.Tensor], torch.Tensor]


@final
@dataclass(frozen=True)
class Kind:
    """What can be done with the values of one type.

    Args:
        rows: How many rows a value has; None: it is one thing, which every replica is given whole.
        take: The value that has some of the rows.
        apply: A value like it, with what a function makes of each tensor in its place.
        parts: Of an object, its parts by what is written after its name (`".x"`, `"['x']"`). They have its rows.
    """

    rows: Callable[[Any], int] | None
    take: Callable[[Any, slice], Any]
    apply: Callable[[Any, TensorFn], Any]
    parts: Callable[[Any], Mapping[str, Tree]] | None = None


def register_batch_type(
    cls: type[T],
    *,
    rows: Callable[[T], int] | None,
    take: Callable[[T, slice], T] | None = None,
    apply: Callable[[T, TensorFn], T] | None = None,
) -> None:
    """Says how batches of a type of one's own are dealt out to replicas.

    Register a type once, where it is defined. What holds for it holds for its subclasses.

    Args:
        cls: The type. Its values become one per-replica value each, also where torch's pytree knows it as a container.
        rows: How many rows a value has. None: its values are given to every replica whole.
        take: `take(value, rows)` is a value that has the rows of a slice, with a start and a stop and no step, of
            which there may be none. Asked for wherever there are rows.
        apply: `apply(value, fn)` is a value like it in which each tensor `t` is `fn(t)`; that is how its tensors are
            moved to a device. The value itself has to stay as it was. None: it holds no tensors.

    Example:
        >>> class Sentences:
        ...     def __init__(self, words, scores):
        ...         self.words, self.scores = words, scores
        >>> torchstrategy.register_batch_type(
        ...     Sentences,
        ...     rows=lambda batch: len(batch.words),
        ...     take=lambda batch, rows: Sentences(batch.words[rows], batch.scores[rows]),
        ...     apply=lambda batch, fn: Sentences(batch.words, fn(batch.scores)),
        ... )
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> source = [Sentences(["a", "b", "c"], torch.ones(3))]
        >>> for batch in strategy.experimental_distribute_dataset(source):
        ...     print(strategy.run(lambda sentences: " ".join(sentences.words), args=(batch,)))
        PerReplica:{
          0: a b,
          1: c
        }

    Raises:
        TypeError: If `cls` is no class, or one whose values are dealt out by rules of their own; or if one of the
            functions cannot be called.
        ValueError: If the type is registered already, or `take` is missing.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.default_collate (which makes batches)
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_batch_type takes a class; got {cls!r}.")
    if cls in _BUILT_IN:
        raise TypeError(f"How a {cls.__name__} is dealt out is fixed: register a type of your own that holds it.")
    for name, function in (("rows", rows), ("take", take), ("apply", apply)):
        if function is not None and not callable(function):
            raise TypeError(f"register_batch_type({cls.__name__}, {name}=...) takes a function; got {function!r}.")
    if cls in _registered:
        raise ValueError(f"{cls.__name__} is registered already. Register a type once, where it is defined.")
    if rows is not None and take is None:
        raise ValueError(
            f"{cls.__name__} has rows, so it must be known how to take some of them: "
            f"register_batch_type({cls.__name__}, rows=..., take=lambda batch, rows: ...)."
        )
    _registered[cls] = Kind(rows, _checked(rows, take), apply or _without_tensors)


def kind_of(value: Any) -> Kind | None:
    """What can be done with a leaf of a batch; None if it is not known how to deal it out."""
    if (registered := _registration_of(value)) is not None:
        return registered
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            return _ONE_THING
        return _NUMBERS if value.dtype.kind in "biufc" else _ROWS
    if isinstance(value, rnn.PackedSequence):
        return _PACKED
    if type(value) is list:
        return _ROWS
    if is_dataclass(value) and not isinstance(value, type):
        return _DATACLASS
    if isinstance(value, MutableMapping):
        return _MAPPING
    return _ONE_THING if isinstance(value, _SINGLE) else None


def is_leaf(value: Any) -> bool:
    """Whether a value is dealt out as one, though torch's pytree may know it as a container."""
    return (
        isinstance(value, (rnn.PackedSequence, torch.Size))
        or (type(value) is list and bool(value) and not any(map(_has_rows, value)))
        or _registration_of(value) is not None
    )


def counts_within(value: Any) -> list[int] | None:
    """How many rows a leaf has, or each thing in it; none for what is one thing; None if one is of no known kind."""
    kind = kind_of(value)
    if kind is None:
        return None
    if kind.parts is None:
        return [] if kind.rows is None else [kind.rows(value)]
    leaves, _ = tree_flatten(list(kind.parts(value).values()), is_leaf)
    counts: list[int] = []
    for leaf in leaves:
        inner = counts_within(leaf)
        if inner is None:
            return None
        counts += inner
    return counts


def named_counts(batch: Tree, name: str = "") -> Iterator[tuple[str, int]]:
    """The names of all values that have rows, and how many.

    Raises:
        TypeError: If it is not known how to deal a value out.
    """
    for path, value in leaves_with_names(batch, is_leaf):
        kind = kind_of(value)
        if kind is None:
            raise TypeError(
                f"batch{name}{path} is {an(type(value).__name__)}, and it is not known how to deal out its rows. Let "
                "the loader's collate_fn make tensors, or lists, tuples and dicts of them; or say how it is done: "
                f"torchstrategy.register_batch_type({type(value).__name__}, rows=..., take=..., apply=...)."
            )
        if kind.parts is not None:
            for part, held in kind.parts(value).items():
                yield from named_counts(held, f"{name}{path}{part}")
        elif kind.rows is not None:
            yield f"{name}{path}", kind.rows(value)


def taken(leaf: Any, rows: slice) -> Any:
    """`leaf` with some of the rows of everything in it that has rows."""
    kind = kind_of(leaf)
    return leaf if kind is None or (kind.rows is None and kind.parts is None) else kind.take(leaf, rows)


def applied(leaf: Any, fn: TensorFn) -> Any:
    """`leaf` with what `fn` makes of each tensor in its place. An array of numbers becomes a tensor."""
    kind = kind_of(leaf)
    return leaf if kind is None else kind.apply(leaf, fn)


def moved(batch: Tree, device: Device) -> Tree:
    """`batch` with each tensor on `device`. Arrays of numbers become tensors."""
    return map_leaves(lambda leaf: applied(leaf, lambda tensor: tensor.to(device)), batch, is_leaf)


def memory_of(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that hold what a tensor is made of."""
    if tensor.is_nested:
        return [tensor.values(), tensor.offsets()]
    if tensor.layout is torch.sparse_coo:
        return [sparse_indices(tensor), sparse_values(tensor)]
    return [tensor]


def _registration_of(value: Any) -> Kind | None:
    if not _registered:
        return None
    return next((_registered[cls] for cls in type(value).__mro__ if cls in _registered), None)


def _has_rows(value: Any) -> bool:
    """Whether a list with such an item is a container, and not a list of rows."""
    if is_container(value):
        return True
    kind = kind_of(value)
    return kind is not None and (kind.rows is not None or kind.parts is not None)


def _checked(rows: Callable[[Any], int] | None, take: Callable[[Any, slice], Any] | None) -> Callable[..., Any]:
    """A user's `take`, whose mistakes would lose rows."""

    def checked(value: Any, piece: slice) -> Any:
        assert rows is not None
        assert take is not None
        part, wanted = take(value, piece), piece.stop - piece.start
        if (found := rows(part)) != wanted:
            raise ValueError(
                f"The take function that {type(value).__name__} was registered with returned {found} rows for rows "
                f"{piece.start} to {piece.stop - 1}, which are {wanted}."
            )
        return part

    return checked


def _without_tensors(value: T, fn: TensorFn) -> T:
    return value


def _sliced(value: Any, rows: slice) -> Any:
    return value[rows]


def _of_tensor(tensor: torch.Tensor) -> Kind | None:
    if tensor.is_nested:
        return _NESTED if tensor.layout is torch.jagged else None
    if tensor.layout is torch.sparse_coo:
        return _SPARSE if tensor.dim() else _TENSOR
    if tensor.layout is not torch.strided:
        return None
    return _ROWS_OF_TENSOR if tensor.dim() else _TENSOR


def _apply_to_tensor(tensor: torch.Tensor, fn: TensorFn) -> torch.Tensor:
    return fn(tensor)


def _apply_to_numbers(array: np.ndarray[Any, Any], fn: TensorFn) -> torch.Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no tensors that cannot be written, and would warn; nor any that go backwards
    return fn(torch.from_numpy(array))


def _take_sparse(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor.narrow_copy(0, rows.start, rows.stop - rows.start)


def _take_nested(tensor: Any, rows: slice) -> torch.Tensor:
    offsets = tensor.offsets()[rows.start : rows.stop + 1]
    first, last = offsets[0], offsets[-1]
    return torch.nested.nested_tensor_from_jagged(tensor.values()[first:last], offsets - first)


def _take_packed(packed: rnn.PackedSequence, rows: slice) -> rnn.PackedSequence:
    if rows.start == rows.stop:
        return _map_packed(packed, lambda tensor: tensor[:0], packed.batch_sizes[:0])
    sequences = rnn.unpack_sequence(packed)[rows]
    return rnn.pack_sequence(sequences, enforce_sorted=packed.sorted_indices is None)


def _apply_to_packed(packed: rnn.PackedSequence, fn: TensorFn) -> rnn.PackedSequence:
    return _map_packed(packed, fn, packed.batch_sizes)  # which torch wants on the CPU, always


def _map_packed(packed: rnn.PackedSequence, fn: TensorFn, batch_sizes: torch.Tensor) -> rnn.PackedSequence:
    order, back = (None if order is None else fn(order) for order in (packed.sorted_indices, packed.unsorted_indices))
    return rnn.PackedSequence(fn(packed.data), batch_sizes, order, back)


def _fields_of(value: Any) -> dict[str, Tree]:
    return {f".{field.name}": getattr(value, field.name) for field in fields(value)}


def _items_of(value: MutableMapping[Any, Tree]) -> dict[str, Tree]:
    return {f"[{key!r}]": part for key, part in value.items()}


def _with_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    changed = copy.copy(value)
    for field in fields(value):
        part = map_leaves(change, getattr(value, field.name), is_leaf)
        object.__setattr__(changed, field.name, part)  # it may be frozen
    return changed


def _with_items(value: MutableMapping[Any, Tree], change: Callable[[Any], Any]) -> Any:
    changed = copy.copy(value)
    for key, part in value.items():
        changed[key] = map_leaves(change, part, is_leaf)
    return changed


def _object(parts: Callable[[Any], Mapping[str, Tree]], changed: Callable[[Any, Callable[[Any], Any]], Any]) -> Kind:
    return Kind(
        rows=None,
        take=lambda value, rows: changed(value, lambda leaf: taken(leaf, rows)),
        apply=lambda value, fn: changed(value, lambda leaf: applied(leaf, fn)),
        parts=parts,
    )


_registered: dict[type, Kind] = {}
_SINGLE = (bool, int, float, complex, str, bytes, type(None), np.generic)
_BUILT_IN = (object, torch.Tensor, np.ndarray, rnn.PackedSequence, list, tuple, dict, *_SINGLE)
_ONE_THING = Kind(None, _sliced, _without_tensors)
_ROWS = Kind(len, _sliced, _without_tensors)
_TENSOR = Kind(None, _sliced, _apply_to_tensor)
_ROWS_OF_TENSOR = Kind(len, _sliced, _apply_to_tensor)
_SPARSE = Kind(len, _take_sparse, _apply_to_tensor)
_NESTED = Kind(lambda tensor: int(tensor.size(0)), _take_nested, _apply_to_tensor)
_NUMBERS = Kind(len, _sliced, _apply_to_numbers)
_PACKED = Kind(
    lambda packed: int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0, _take_packed, _apply_to_packed
)
_DATACLASS = _object(_fields_of, _with_fields)
_MAPPING = _object(_items_of, _with_items)
