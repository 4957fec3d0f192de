"""Batches of types of the user's own: how many rows they have, and how some of the rows are taken."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, final

import numpy as np
import torch
from torch.nn.utils import rnn

from torchstrategy._core.errors import an, plural

T = TypeVar("T")
TensorFn = Callable[[torch.Tensor], torch.Tensor]

SINGLE = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.Size)
"""The types of single values, which have no rows, so that every replica gets them as they are."""


@final
@dataclass(frozen=True)
class Kind:
    """How to split the values of one type.

    Args:
        rows: Returns how many rows a value has. None: it is a single value, which every replica gets as it is.
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

    Register a type once, where it is defined. The registration also holds for subclasses of the type.

    Args:
        cls: The type. A value of it becomes one per-replica value, even if torch's pytree knows the type as a
            container.
        rows: `rows(value)` returns how many rows a value has. None: every replica gets the values as they are.
        take: `take(value, rows)` returns a value that has the rows of a slice, which has a start, a stop and no step.
            It is required if there are rows. With an empty slice it is called only if somebody needs a part without
            rows, as a run with `RunOptions(run_empty_replicas=True)` does.
        apply: `apply(value, fn)` returns a value in which each tensor `t` is replaced by `fn(t)`; the library uses it
            to move the tensors to a device. It must not change `value` itself. None: the values hold no tensors.

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
        ValueError: If the type is registered already, or `take` is missing, or there for what has no rows.

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
    if rows is None and take is not None:
        raise ValueError(
            f"register_batch_type({cls.__name__}, rows=None, take=...): what has no rows is given whole, and none are "
            "taken. Say how many rows it has, or leave out take."
        )
    theirs = _Registered(cls, rows or len, take or sliced, apply or without_tensors)
    _registered[cls] = Kind(
        None if rows is None else theirs.rows,
        whole if take is None else theirs.take,
        without_tensors if apply is None else theirs.apply,
    )


@final
@dataclass(frozen=True)
class _Registered:
    """The functions that a user has registered for a type. Their results are checked, as an error would lose rows."""

    cls: type
    rows_of: Callable[[Any], Any]
    take_of: Callable[[Any, slice], Any]
    apply_of: Callable[[Any, TensorFn], Any]

    def rows(self, value: Any) -> int:
        count = self.rows_of(value)
        if not isinstance(count, SupportsIndex) or count < 0:  # type: ignore[operator]
            raise TypeError(f"{self._told('rows')} returned {count!r}, which is no number of rows.")
        return operator.index(count)

    def take(self, value: Any, rows: slice) -> Any:
        part = self._own("take", self.take_of(value, rows))
        found, wanted = self.rows(part), rows.stop - rows.start
        if found != wanted:
            raise ValueError(
                f"{self._told('take')} returned {plural(found, 'row')} for slice({rows.start}, {rows.stop}), which is "
                f"{wanted}."
            )
        return part

    def apply(self, value: Any, fn: TensorFn) -> Any:
        return self._own("apply", self.apply_of(value, fn))

    def _own(self, name: str, result: Any) -> Any:
        if not isinstance(result, self.cls):
            raise TypeError(f"{self._told(name)} returned {an(type(result).__name__)}, and not a {self.cls.__name__}.")
        return result

    def _told(self, name: str) -> str:
        return f"The {name} function that {self.cls.__name__} was registered with"


def registration_of(value: Any) -> Kind | None:
    """The registration of the type of a value, or of one of its base classes; None if there is none."""
    if not _registered:
        return None
    return next((_registered[cls] for cls in type(value).__mro__ if cls in _registered), None)


def without_tensors(value: T, fn: TensorFn) -> T:
    return value


def sliced(value: Any, rows: slice) -> Any:
    return value[rows]


def whole(value: T, rows: slice) -> T:
    return value


_registered: dict[type, Kind] = {}
_BUILT_IN = (object, torch.Tensor, np.ndarray, rnn.PackedSequence, list, tuple, dict, *SINGLE)
