"""Questions to objects of the program, which may refuse to be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Note [Objects that refuse]
# `len(dataset)` may raise any error, and so may an attribute: by `__getattr__`, by a
# property, or since `__init__` of a subclass has not called that of torch. The program
# never asks so, and is right. A lint that asks leaves that one object alone then, and
# goes on with the others.


def asked(question: Callable[[], T], otherwise: T) -> T:
    """The program's objects' answer to a question; another value if they refuse."""
    try:
        return question()
    except Exception:
        return otherwise


def attribute(thing: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a program's object; another value if it has none, or refuses."""
    return asked(lambda: getattr(thing, name, otherwise), otherwise)


def is_set(thing: Any, name: str) -> bool:
    """Whether an attribute is set.

    That of an object that has an answer to each name, as a mock has, says nothing.
    """
    value = attribute(thing, name)
    return isinstance(value, (int, np.bool_)) and bool(value)


def number_in(thing: Any, name: str) -> int | None:
    """The whole number that an attribute is; None if it is none."""
    value = attribute(thing, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def length_of(thing: Any) -> int | None:
    """The length of an object of the program; None if it has none, or refuses."""
    return asked(lambda: len(thing), None)


def entry_of(mapping: Any, key: Any) -> Any:
    """What a dictionary has; None if it has nothing, or is none.

    A `get` of the program's own is not called.
    """
    return dict.get(mapping, key) if isinstance(mapping, dict) else None


def named_in(thing: Any) -> dict[str, Any]:
    """What an object has as its own attributes, by name."""
    nothing: list[tuple[Any, Any]] = []
    names = asked(lambda: list(vars(thing).items()), nothing)
    return {name: value for name, value in names if isinstance(name, str)}
