"""What a step keeps outside of the model and the optimizer.

It may keep state in globals, closure variables, attributes and containers.

Every training begins with what the step found there, and goes on with what it has left
there itself. If trainings shared it, the second one would find what the first one has
written: a scale that is computed once, from the first batch, would be the same in both,
and the check would pass for a step that fails in a real run.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn

from torchstrategy._base.objects.attribute_contents import (
    globals_in,
    is_plain_holder,
    named_items,
    write_items,
)
from torchstrategy._base.objects.changes import MISSING, are_same
from torchstrategy._base.plain import PLAIN
from torchstrategy.testing._same_as_plain.held import NOT_LOOKED_INTO, is_a_stranger

_DEPTH = 3  # how many calls deep functions are looked into
# A container of more items is data, and not a place where a step keeps its state.
_LONG = 10_000
_MUCH = 2**26  # bytes of an array; a larger one is data, too


class _Global(NamedTuple):
    """A global variable that a function uses, or a class's attribute that it reads."""

    owner: Any
    name: str

    def read(self) -> Any:
        table = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return table.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        if value is self.read():
            return
        if not isinstance(self.owner, dict):
            delattr(self.owner, self.name) if value is MISSING else setattr(
                self.owner, self.name, value
            )
        elif value is MISSING:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


@final
class State(NamedTuple):
    """What was kept at one moment.

    Args:
        variables: The globals, and the attributes of classes, with their values.
        containers: The containers, objects and closure variables, with what they held.
        arrays: The arrays of numpy, with their numbers.
    """

    variables: Sequence[tuple[_Global, Any]]
    containers: Sequence[tuple[Any, dict[tuple[str, Any], Any]]]
    arrays: Sequence[tuple[Any, Any]]


@final
class KeptState:
    """The places where a step keeps state.

    Args:
        step: The step.
        makers: The functions that make models and optimizers. What they keep themselves
            is theirs, for they are not trained with; but the classes of modules that
            they name have methods that the step calls.
    """

    def __init__(self, step: Any, makers: Iterable[Any]) -> None:
        self._variables: dict[tuple[int, str], _Global] = {}
        self._roots: list[Any] = []
        seen: set[int] = set()
        self._find(step, _DEPTH, seen)
        for maker in makers:
            named = _values_used_by(maker) if inspect.isfunction(maker) else [maker]
            for value in filter(inspect.isclass, named):
                self._find(value, _DEPTH, seen)

    def read(self) -> State:
        """What is kept now."""
        variables = [
            (variable, variable.read()) for variable in self._variables.values()
        ]
        containers: dict[int, tuple[Any, dict[tuple[str, Any], Any]]] = {}
        arrays: dict[int, tuple[Any, Any]] = {}
        waiting = [*self._roots, *(value for _, value in variables)]
        while waiting:
            value = waiting.pop()
            if id(value) in containers or id(value) in arrays:
                continue
            if (
                isinstance(value, np.ndarray)
                and value.nbytes <= _MUCH
                and not value.dtype.hasobject
            ):
                arrays[id(value)] = (value, value.copy())
            elif _is_open(value):
                items = named_items(value)
                containers[id(value)] = (value, items)
                waiting.extend(items.values())
        return State(variables, list(containers.values()), list(arrays.values()))

    def write(self, state: State) -> None:
        """Puts back what was kept. Places that are as they were are not written."""
        for variable, value in state.variables:
            variable.write(value)
        for container, items in state.containers:
            now = named_items(container)
            if list(now) != list(items) or not are_same(
                list(now.values()), list(items.values())
            ):
                write_items(container, items)
        for array, numbers in state.arrays:
            if array.flags.writeable and array.tobytes() != numbers.tobytes():
                array[...] = numbers

    def _find(self, fn: Any, depth: int, seen: set[int]) -> None:
        """Notes where a function keeps state.

        It also notes which of the user's functions and classes the function names.
        """
        if id(fn) in seen or depth < 0:
            return
        seen.add(id(fn))
        if isinstance(fn, functools.partial):
            self._roots.extend((*fn.args, *fn.keywords.values()))
            self._find(fn.func, depth, seen)
        elif inspect.ismethod(fn):
            self._roots.append(fn.__self__)
            self._find(fn.__func__, depth, seen)
            self._find(type(fn.__self__), depth - 1, seen)
        elif inspect.isclass(fn):
            self._find_in_class(fn, depth, seen)
        elif is_a_stranger(fn) or isinstance(fn, nn.Module):
            return
        elif inspect.isfunction(fn):
            self._find_in_function(fn, depth, seen)
        elif callable(fn):
            self._roots.append(fn)
            self._find(type(fn), depth, seen)

    def _find_in_class(self, cls: type, depth: int, seen: set[int]) -> None:
        for base in cls.__mro__:
            if base.__module__.split(".")[0] in NOT_LOOKED_INTO:
                continue
            for name, value in list(vars(base).items()):
                if inspect.isfunction(value):
                    self._find(value, depth - 1, seen)
                elif not name.startswith("__") and isinstance(
                    value, (*PLAIN, torch.Tensor, list, dict, set, deque)
                ):
                    self._variables[id(base), name] = _Global(base, name)

    def _find_in_function(
        self, fn: types.FunctionType, depth: int, seen: set[int]
    ) -> None:
        self._roots.extend(
            (
                *(fn.__closure__ or ()),
                *(fn.__defaults__ or ()),
                *(fn.__kwdefaults__ or {}).values(),
            )
        )
        self._roots.append(vars(fn))
        for name in globals_in(fn.__code__):
            self._variables[id(fn.__globals__), name] = _Global(fn.__globals__, name)
        for value in _values_used_by(fn):
            if callable(value):
                self._find(value, depth - 1, seen)


def _values_used_by(fn: types.FunctionType) -> Iterator[Any]:
    for name in globals_in(fn.__code__):
        yield fn.__globals__.get(name)
    for cell in fn.__closure__ or ():
        yield from named_items(cell).values()


def _is_open(value: Any) -> bool:
    """Whether a value is a container or an object with exchangeable contents.

    A part of a model is none.
    """
    if isinstance(value, types.CellType):
        return True
    if value is MISSING or isinstance(value, (*PLAIN, torch.Tensor, nn.Module, type)):
        return False
    if isinstance(value, (list, dict, set, tuple, frozenset, deque)):
        return len(value) <= _LONG
    return not callable(value) and not is_a_stranger(value) and is_plain_holder(value)
