"""A part of what a process has once, and each rank on a thread has for itself."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of what a process has.

    Attributes:
        take: Returns what it is now. What it returns must not change when the process
            changes.
        put: Makes it what `take` returned.
        is_same: Whether two that `take` returned are so alike that neither has to be
            put in place of the other.
        begin: Returns what a new process has, of what the process has that begins it.
    """

    take: Callable[[], Any]
    put: Callable[[Any], object]
    is_same: Callable[[Any, Any], bool] = operator.eq
    begin: Callable[[Any], Any] = lambda value: value


def are_same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences have the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def part_of_names(names: Sequence[tuple[Any, str]]) -> Part:
    """The part that is in attributes of modules and classes.

    Args:
        names: Each with its owner. A list, dict or set may be written into: a new
            process has a copy of it.
    """

    def take() -> list[Any]:
        return [getattr(owner, name) for owner, name in names]

    def put(values: Sequence[Any]) -> None:
        for (owner, name), value in zip(names, values, strict=True):
            setattr(owner, name, value)

    def begin(values: Sequence[Any]) -> list[Any]:
        return [
            copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for value in values
        ]

    return Part(take, put, are_same_objects, begin)


def never_same(one: object, other: object) -> bool:
    """Says of a part that it is put in place each time.

    A comparison would take longer, or call methods of the program's objects.
    """
    return False
