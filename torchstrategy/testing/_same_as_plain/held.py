"""What a function holds besides its arguments.

It holds closure variables, globals, attributes, and what these contain.

With it a message can name the tensor that was left on another device, or the generator
that all replicas share.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torchstrategy._base.objects.module_traversal import held_plainly
from torchstrategy._base.tree import leaves_with_names

_DEPTH = 3  # how many calls deep functions are looked into
# A list of more items is data, and not a place where a step keeps its tensors.
_LONG = 100
NOT_LOOKED_INTO = ("torch", "torchstrategy", "numpy", "builtins")


def held_by(fn: object) -> Iterator[tuple[str, Any]]:
    """The objects that `fn` and the functions that it names hold.

    Each has a name that a person would use.

    `("`weights['a']`, a closure variable of `step`", tensor)`. Modules are looked into,
    and so are the attributes of objects, one level deep.
    """
    seen: set[int] = set()
    for function in _functions(fn, _DEPTH, set()):
        for name, kind, value in _named(function):
            for path, leaf in _within(name, value):
                if id(leaf) not in seen:
                    seen.add(id(leaf))
                    yield f"`{path}`, {kind}", leaf


def words_in(fn: object) -> set[str]:
    """The names and string constants of `fn` and the functions that it names."""
    functions = filter(inspect.isfunction, _functions(fn, _DEPTH, set()))
    return set().union(*(_words_of(function.__code__) for function in functions))


def words_on_the_way(error: BaseException) -> Iterator[tuple[str, set[str]]]:
    """The names and strings in each of the user's functions that `error` came through.

    For example, the error may have come through a module's `forward`.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").split(".")[0] not in NOT_LOOKED_INTO:
            yield f"`{frame.f_code.co_name}`", _words_of(frame.f_code)


def places_on_the_way(error: BaseException) -> Iterator[str]:
    """The lines of the user's functions that `error` came through, outermost first."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").split(".")[0] not in NOT_LOOKED_INTO:
            code = frame.f_code
            source = linecache.getline(code.co_filename, line).strip()
            yield f"{code.co_filename}:{line}, in {code.co_name}: {source}"


def _words_of(code: types.CodeType) -> set[str]:
    words = {
        *code.co_names,
        *(constant for constant in code.co_consts if isinstance(constant, str)),
    }
    return words.union(
        *(
            _words_of(inner)
            for inner in code.co_consts
            if isinstance(inner, types.CodeType)
        )
    )


def _functions(fn: object, depth: int, seen: set[int]) -> Iterator[Any]:
    """`fn`, the functions inside of it, and the user's functions that it names.

    A partial or a method has a function inside of it.
    """
    if (
        id(fn) in seen
        or not callable(fn)
        or isinstance(fn, (nn.Module, type))
        or is_a_stranger(fn)
    ):
        return
    seen.add(id(fn))
    yield fn
    if isinstance(fn, functools.partial):
        yield from _functions(fn.func, depth, seen)
    elif inspect.ismethod(fn):
        yield from _functions(fn.__func__, depth, seen)
    elif not inspect.isroutine(fn):
        yield from _functions(type(fn).__call__, depth, seen)
    if depth:
        for _, _, value in _named(fn):
            yield from _functions(value, depth - 1, seen)


def _named(fn: Any) -> Iterator[tuple[str, str, Any]]:
    """The objects that a function, method, partial or callable object holds.

    Each comes as its name, the kind of the name, and the value.
    """
    if isinstance(fn, functools.partial):
        arguments = {
            **{str(i): value for i, value in enumerate(fn.args)},
            **fn.keywords,
        }
        yield from (
            (name, "an argument of functools.partial", value)
            for name, value in arguments.items()
        )
    elif inspect.ismethod(fn):
        yield from _attributes("self", fn.__self__)
    elif not inspect.isfunction(fn):
        yield from _attributes(type(fn).__name__, fn)
    else:
        # A closure variable may have no value yet.
        with suppress(ValueError):
            found = inspect.getclosurevars(fn)
            yield from (
                (n, f"a closure variable of `{fn.__name__}`", v)
                for n, v in found.nonlocals.items()
            )
            yield from (
                (n, f"a global that `{fn.__name__}` uses", v)
                for n, v in found.globals.items()
            )
        yield from (
            ("a default", f"of an argument of `{fn.__name__}`", v)
            for v in fn.__defaults__ or ()
        )


def _attributes(name: str, owner: object) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(owner, (nn.Module, type)):
        for attribute, value in getattr(owner, "__dict__", {}).items():
            yield (
                f"{name}.{attribute}",
                f"an attribute of a {type(owner).__name__}",
                value,
            )


def _within(name: str, value: object) -> Iterator[tuple[str, Any]]:
    for path, leaf in leaves_with_names(value, _is_long):
        yield name + path, leaf
        if isinstance(leaf, nn.Module):
            for module_path, module in leaf.named_modules(prefix=name + path):
                yield from (
                    (f"{module_path}.{n}", p)
                    for n, p in module.named_parameters(recurse=False)
                )
                yield from (
                    (f"{module_path}.{n}", b)
                    for n, b in module.named_buffers(recurse=False)
                )
                yield from (
                    (f"{module_path}{n}", held) for n, held in held_plainly(module)
                )
        elif not is_a_stranger(leaf) and not callable(leaf):
            yield from (
                (path, held) for path, _, held in _attributes(name + path, leaf)
            )


def is_a_stranger(value: object) -> bool:
    """Whether a value belongs to a library, so that what it holds is not the user's."""
    maker = value if inspect.isroutine(value) else type(value)
    package = (getattr(maker, "__module__", None) or "builtins").split(".")[0]
    is_functools = isinstance(value, functools.partial) or inspect.ismethod(value)
    return package in NOT_LOOKED_INTO and not is_functools


def _is_long(value: object) -> bool:
    return isinstance(value, torch.Size) or (
        isinstance(value, (list, tuple, dict)) and len(value) > _LONG
    )
