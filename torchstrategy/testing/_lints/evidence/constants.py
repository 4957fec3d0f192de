"""The whole numbers that a program's function knows, such as a schedule's length."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torchstrategy.testing._lints.evidence.asking import attribute, named_in

_DEEPEST = 3  # a function that calls another one


def constants_of(function: Any) -> dict[str, int]:
    """The numbers in a function's closure, defaults, attributes and globals, by name.

    Those in arguments of `partial` are there, too.

    Of an object, only attributes that the function names count. Nothing of the program
    is called.
    """
    found: dict[str, int] = {}
    for name, number in _numbers(function, _DEEPEST):
        found.setdefault(name, number)
    return found


def mentions(function: Any, *words: str) -> bool:
    """Whether a function, or one that it calls, uses one of some names or strings."""
    return any(
        word in (*code.co_names, *code.co_consts)
        for code in _codes(function, _DEEPEST)
        for word in words
    )


def multiplies(function: Any) -> bool:
    """Whether a function multiplies and has a whole number above 2.

    `10 * epochs` does. A function that it calls may do so, too.
    """
    return any(
        _multiplies(list(dis.get_instructions(code)))
        for code in _codes(function, _DEEPEST)
    )


def _multiplies(instructions: list[dis.Instruction]) -> bool:
    numbers = [
        one.argval
        for one in instructions
        if one.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
    ]
    is_product = any(
        one.opname == "BINARY_MULTIPLY" or one.argrepr == "*" for one in instructions
    )
    return is_product and any(
        isinstance(number, int) and number > 2 for number in numbers
    )


def _numbers(function: Any, depth: int) -> Iterator[tuple[str, int]]:
    code = _code_of(function)
    for name, value in _known_to(function):
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value
        elif code is not None and not isinstance(value, types.ModuleType):
            named = named_in(value)
            numbers = {
                attribute: named[attribute]
                for attribute in code.co_names
                if attribute in named
            }
            yield from (
                (one, it)
                for one, it in numbers.items()
                if isinstance(it, int) and not isinstance(it, bool)
            )
    if depth:
        for inner in _called_by(function):
            yield from _numbers(inner, depth - 1)


def _codes(function: Any, depth: int) -> Iterator[types.CodeType]:
    code = _code_of(function)
    if code is not None:
        yield code
    if depth:
        for inner in _called_by(function):
            yield from _codes(inner, depth - 1)


def _called_by(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func]
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return [value for _, value in _known_to(function) if isinstance(value, kinds)]


def _known_to(function: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function can use besides its arguments, by name."""
    if isinstance(function, functools.partial):
        code = _code_of(function.func)
        names = code.co_varnames if code is not None else ()
        yield from zip(names, function.args, strict=False)
        yield from function.keywords.items()
        return
    plain = _plain(function)
    if plain is not function:
        yield "self", attribute(function, "__self__", function)
    if plain is None:
        return
    code, cells = plain.__code__, plain.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        if cell != types.CellType():  # it is empty until its variable has a value
            yield name, cell.cell_contents
    defaults = plain.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    # The program may have given it more of them.
    yield from zip(reversed(arguments), reversed(defaults), strict=False)
    yield from (plain.__kwdefaults__ or {}).items()
    yield from (
        (name, plain.__globals__[name])
        for name in code.co_names
        if name in plain.__globals__
    )


def _plain(function: Any) -> types.FunctionType | None:
    """The function of Python that is called; None if there is none."""
    if isinstance(function, types.FunctionType):
        return function
    called = inspect.getattr_static(type(function), "__call__", None)
    found = function.__func__ if isinstance(function, types.MethodType) else called
    return found if isinstance(found, types.FunctionType) else None


def _code_of(function: Any) -> types.CodeType | None:
    plain = _plain(function)
    return None if plain is None else plain.__code__
