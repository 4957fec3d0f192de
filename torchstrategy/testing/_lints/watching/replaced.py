"""Functions that tell before or after they are called, and late replacements.

These are replaced late in a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch

from torchstrategy.testing._simulation.replacing import replacing

Method = Callable[..., Any]
Replaced = list[tuple[Any, str, Any]]
"""What has an attribute, its name, and what stands there meanwhile."""


def before(method: Method, tell: Method) -> Method:
    """The method, which tells its arguments first."""

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            tell(*args, **kwargs)
        return method(*args, **kwargs)

    return told


def after(method: Method, tell: Method) -> Method:
    """The method, which tells its arguments when it has returned."""

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not torch.compiler.is_compiling():
            tell(*args, **kwargs)
        return result

    return told


@final
class Late:
    """What is replaced from some moment of a block on, until it ends."""

    def __init__(self) -> None:
        self._at_the_end: ExitStack | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """The block."""
        try:
            with ExitStack() as self._at_the_end:
                yield
        finally:
            self._at_the_end = None

    @property
    def is_open(self) -> bool:
        """Whether the block is open."""
        return self._at_the_end is not None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute until the end of the block."""
        if self._at_the_end is not None:
            self._at_the_end.enter_context(replacing([(owner, name, value)]))


def listed(value: Any) -> list[Any]:
    """The members of a list or a tuple; anything else is the only one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
