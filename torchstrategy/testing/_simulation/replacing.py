"""Attributes of modules and classes that have other values for a while."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, final


@contextmanager
def replacing(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """A block in which attributes have other values, and afterwards their old ones.

    A function in place of another one can be used as that one is: pickled, and as an
    attribute of a class.

    Args:
        values: What has the attribute, its name, and its value in the block.
    """
    builtins: dict[int, _Builtin] = {}
    alike = [one for value in values for one in _used_alike(*value, builtins)]
    before = [(owner, name, _value_of(owner, name)) for owner, name, _ in alike]
    for owner, name, value in alike:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, value), (_, _, ours) in zip(before, alike, strict=True):
            is_function = isinstance(ours, (FunctionType, _Builtin))
            # Otherwise the program has put its own value there.
            if not is_function or _value_of(owner, name) is ours:
                setattr(owner, name, value)


def _value_of(owner: Any, name: str) -> Any:
    """What an attribute is now: of a class, also the `staticmethod` around it."""
    return (
        inspect.getattr_static(owner, name)
        if isinstance(owner, type)
        else getattr(owner, name)
    )


def _used_alike(
    owner: Any, name: str, value: Any, builtins: dict[int, _Builtin]
) -> list[tuple[Any, str, Any]]:
    """What has to be replaced, and by what.

    The program can then use the new function as it uses the old one.

    Args:
        owner: What has the attribute.
        name: Its name.
        value: Its value in the block.
        builtins: What is in place of builtin functions, by the id of the function that
            it calls.
    """
    if not isinstance(owner, ModuleType) or not isinstance(value, FunctionType):
        return [(owner, name, value)]
    before = getattr(owner, name, None)
    if isinstance(before, (BuiltinFunctionType, _Builtin)):
        own = builtins.setdefault(
            id(value), _Builtin(value, f"{owner.__name__}:{name}")
        )  # `io.open` is `open`
        return [(owner, name, own)]
    # `torch.load` is pickled as `torch.serialization.load`.
    home = sys.modules.get(getattr(before, "__module__", None) or "")
    is_elsewhere = (
        home is not None and home is not owner and vars(home).get(name) is before
    )
    return [(owner, name, value), *([(home, name, value)] if is_elsewhere else [])]


@final
class _Builtin:
    """A function in place of a builtin one.

    If a class has it as an attribute, it does not become a method.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        functools.update_wrapper(self, function)
        self._function, self._of_module = function, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self._of_module,)
