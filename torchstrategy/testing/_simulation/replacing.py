"""Attributes of modules and classes that have other values for a while."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """A block in which attributes have other values, and after which they have those from before.

    Args:
        values: What has the attribute, its name, and its value in the block.
    """
    before = [(owner, name, _value_of(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _value_of(owner: Any, name: str) -> Any:
    """What an attribute is now: of a class, also the `staticmethod` around a function."""
    return inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
