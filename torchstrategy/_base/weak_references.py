"""Weak references to the user's objects, which do not keep them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar("_T")


def living(references: Iterable[weakref.ref[_T]]) -> list[_T]:
    """The objects that some references refer to, as far as they still live."""
    # Another thread may add one meanwhile, so the references are listed at once.
    return [
        thing for reference in list(references) if (thing := reference()) is not None
    ]
