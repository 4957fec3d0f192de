"""A part of what a process has once, and each rank on a thread has for itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of what a process has.

    Attributes:
        take: Returns what it is now. What it returns must not change when the process changes.
        put: Makes it what `take` returned.
        is_same: Whether two that `take` returned are so alike that neither has to be put in place of the other.
        begin: Returns what a new process has, of what the process has that begins it.
    """

    take: Callable[[], Any]
    put: Callable[[Any], None]
    is_same: Callable[[Any, Any], bool] = operator.eq
    begin: Callable[[Any], Any] = lambda value: value


def are_same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences have the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def never_same(one: object, other: object) -> bool:
    """Says of a part that it is put in place each time: to compare would take longer, or ask the program's objects."""
    return False
