"""Which modules and trainable tensors does a step use by name, and which schedulers and scalers?

A model that was created outside of the scope is used by every replica as it stands, and backward in each of them would
add to its one gradient. The step is looked at before it runs, so that such gradients are noticed and refused. What it
reaches by other ways, such as through an attribute of an attribute, is not found.

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
from torch.optim.lr_scheduler import LRScheduler

Found = nn.Module | torch.Tensor | LRScheduler | torch.amp.GradScaler | types.MethodType

_DEPTH = 3  # a step may call a function that calls a function that uses the model


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, Found]]:
    """The modules, leaf tensors that require grad, schedulers and scalers which `fn` names, each with the name.

    A bound method of a scheduler or scaler is found as such.
    """
    return _in_function(fn, _DEPTH, seen=set())


def _in_function(fn: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Found]]:
    if isinstance(fn, functools.partial):
        for value in (*fn.args, *fn.keywords.values()):
            yield from _in_value("an argument of functools.partial", value, depth, seen)
        fn = fn.func
    if isinstance(fn, types.MethodType):
        owner = fn.__self__
        if isinstance(owner, (LRScheduler, torch.amp.GradScaler)):
            yield fn.__name__, fn
        if not isinstance(owner, (nn.Module, type)):
            for name, value in getattr(owner, "__dict__", {}).items():
                yield from _in_value(f"self.{name}", value, 0, seen)
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType) or id(fn) in seen or (fn.__module__ or "").startswith("torch"):
        return
    seen.add(id(fn))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
        yield from _in_value(name, value, depth, seen)
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            yield from _in_value(name, fn.__globals__[name], depth, seen)
    for value in fn.__defaults__ or ():
        yield from _in_value("a default argument", value, depth, seen)


def _in_value(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Found]]:
    if isinstance(value, (nn.Module, LRScheduler, torch.amp.GradScaler)):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
    elif isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Found):
                yield from _in_value(name, item, 0, seen)
    elif depth:
        yield from _in_function(value, depth - 1, seen)
