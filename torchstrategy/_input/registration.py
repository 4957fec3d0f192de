"""What users say of batches of types of their own: how many rows, and how some of them are taken."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch.nn.utils import rnn

from torchstrategy._core.errors import an, plural
from torchstrategy._core.types import Tree

T = TypeVar("T")
TensorFn = Callable[[torch.Tensor], torch.Tensor]

SINGLE = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.Size)
"""Types of one thing, which every replica is given whole."""


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
        take: `take(value, rows)` is a value that has the rows of a slice, with a start and a stop and no step. To be
            given wherever there are rows. For no rows it is called only if somebody asks for such a piece, as a run
            with `RunOptions(run_empty_replicas=True)` does.
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
        None if rows is None else theirs.rows, theirs.take, without_tensors if apply is None else theirs.apply
    )


@final
@dataclass(frozen=True)
class _Registered:
    """What a user said of a type. A mistake would lose rows, so what the functions return is looked at."""

    cls: type
    rows_of: Callable[[Any], Any]
    take_of: Callable[[Any, slice], Any]
    apply_of: Callable[[Any, TensorFn], Any]

    def rows(self, value: Any) -> int:
        count = self.rows_of(value)
        if not hasattr(count, "__index__") or count < 0:
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
    """What was said of the type of a value, or of one that it is a subclass of."""
    if not _registered:
        return None
    return next((_registered[cls] for cls in type(value).__mro__ if cls in _registered), None)


def without_tensors(value: T, fn: TensorFn) -> T:
    return value


def sliced(value: Any, rows: slice) -> Any:
    return value[rows]


_registered: dict[type, Kind] = {}
_BUILT_IN = (object, torch.Tensor, np.ndarray, rnn.PackedSequence, list, tuple, dict, *SINGLE)
