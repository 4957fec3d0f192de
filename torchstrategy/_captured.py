"""Which modules and trainable tensors does a step use by name, and which schedulers and scalers?

A model that was created outside of the scope is used by every replica as it stands, and backward in each of them would
add to its one gradient. The step is looked at before it runs, so that such gradients are noticed and refused. Of an
object that it names, the attributes count as named; what it reaches by other ways, such as through an attribute of an
attribute, is not found.

A learning-rate scheduler or a `GradScaler` counts steps, and all replicas share it: those that are found act once for
all of them; see `_once`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Found = nn.Module | torch.Tensor | LRScheduler | torch.amp.GradScaler | types.MethodType

_COUNTERS = (LRScheduler, torch.amp.GradScaler)
_DEPTH = 3  # a step may call a function that calls a function that uses the model


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, Found]]:
    """The modules, leaf tensors that require grad, schedulers and scalers which `fn` names, each with the name.

    A bound method of a scheduler or scaler is found as such.
    """
    return _in_value("the step", fn, _DEPTH + 1, seen=set())


def held_by(thing: Any) -> Iterator[tuple[str, Found]]:
    """What the attributes of an object are, of the same kinds; of an argument of the step, say."""
    return _in_attributes("an argument", thing, seen=set())


def _in_value(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Found]]:
    if isinstance(value, (nn.Module, *_COUNTERS)):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
            if isinstance(value, nn.Module):
                yield from _counters_in(name, value)
    elif isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Found):
                yield from _in_value(name, item, 0, seen)
    elif depth and not isinstance(value, (type, types.ModuleType, Optimizer)):
        yield from _in_callable(name, value, depth - 1, seen)


def _in_callable(name: str, fn: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Found]]:
    """What a function names; of a bound method, or another object, first what the object holds."""
    if isinstance(fn, functools.partial):
        for value in (*fn.args, *fn.keywords.values()):
            yield from _in_value("an argument of functools.partial", value, depth, seen)
        fn = fn.func
    if isinstance(fn, types.MethodType):
        if isinstance(fn.__self__, _COUNTERS):
            yield fn.__name__, fn
        yield from _in_value("self", fn.__self__, 1, seen)
        fn = fn.__func__
    elif not isinstance(fn, types.FunctionType):
        yield from _in_attributes(name, fn, seen)
        fn = type(fn).__call__ if callable(fn) else None
    if isinstance(fn, types.FunctionType) and id(fn) not in seen and not (fn.__module__ or "").startswith("torch"):
        seen.add(id(fn))
        yield from _in_function(fn, depth, seen)


def _in_function(fn: types.FunctionType, depth: int, seen: set[int]) -> Iterator[tuple[str, Found]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
        yield from _in_value(name, value, depth, seen)
    for name in dict.fromkeys(_names_in(fn.__code__)):
        if name in fn.__globals__:
            yield from _in_value(name, fn.__globals__[name], depth, seen)
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield from _in_value("a default argument", value, depth, seen)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The global names of a function, and of the functions and comprehensions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _in_attributes(name: str, thing: Any, seen: set[int]) -> Iterator[tuple[str, Found]]:
    for attribute, value in _attributes(thing):
        yield from _in_value(f"{name}.{attribute}", value, 0, seen)


def _counters_in(name: str, module: nn.Module) -> Iterator[tuple[str, Found]]:
    for attribute, value in _attributes(module):
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, _COUNTERS):
                yield f"{name}.{attribute}", item


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    return list(getattr(thing, "__dict__", {}).items())
