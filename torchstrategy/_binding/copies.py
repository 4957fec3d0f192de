"""How a replica gets copies of what the user's objects hold: deep copies, and functions over its own objects.

`copy.deepcopy` does not copy functions. A function may close over parts of a model: a
`model.forward = lambda x: model.head(model.body(x))`, a hook or a wrapper. A replica's copy of the model would have the
user's function, which uses the user's own model. During a run, a proxy leads from this to the replica's model, but not
on every thread: autograd has threads of its own, on which activation checkpoints call such functions again. So each
replica gets functions over its own parts.
"""

from __future__ import annotations

import copy
import functools
import traceback
import types
from collections.abc import Mapping
from typing import Any, TypeGuard, final

import torch
from torch import nn

from torchstrategy._binding.attribute_contents import closed_over

_DEPTH = 3  # how deep containers are looked into: more than a list of lists is rare


@final
class ClosureRebinder:
    """Makes, of the user's functions, functions that close over a replica's objects.

    Args:
        own: By the id of an object of the user's, the object that the replica has in its place.
    """

    def __init__(self, own: Mapping[int, Any]) -> None:
        self._own = own
        self._made: dict[int, Any] = {}
        self._seen: list[object] = []  # keeps the objects alive whose ids `_made` has

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """The replica's version of a value: of a function, or of a container of functions. Other values are returned.

        A function that closes over no part of the model is returned as it is. Lists and dicts are changed in place,
        since they are the replica's own copies already.
        """
        if depth and type(value) is list:
            value[:] = [self.of(item, depth - 1) for item in value]
        elif depth and type(value) is dict:
            value.update({key: self.of(item, depth - 1) for key, item in value.items()})
        elif depth and type(value) is tuple:
            items = tuple(self.of(item, depth - 1) for item in value)
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        else:
            return self._held(value)
        return value

    def _held(self, value: Any) -> Any:
        """The replica's version of an object that a function uses, or of a function."""
        own = self._own.get(id(value), value)
        if own is not value:
            return own
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._held(value.__self__))
        if type(value) is functools.partial:
            keywords = {name: self._held(item) for name, item in value.keywords.items()}
            return functools.partial(self._held(value.func), *map(self._held, value.args), **keywords)
        if not is_users(value):
            return value
        if id(value) not in self._made:
            self._seen.append(value)
            self._made[id(value)] = value  # a function that refers to itself keeps referring to the user's function
            self._made[id(value)] = self._rebound(value)
        return self._made[id(value)]

    def _rebound(self, fn: types.FunctionType) -> types.FunctionType:
        closed, defaults, keywords = dict(closed_over(fn)), fn.__defaults__ or (), fn.__kwdefaults__ or {}
        used = {id(value): value for value in (*closed.values(), *defaults, *keywords.values())}
        own = {key: held for key, value in used.items() if (held := self._held(value)) is not value}
        if not own:
            return fn
        cells = tuple(
            # A cell whose value is not replaced stays the user's own, so that a counter in it counts for all replicas.
            types.CellType(own[id(closed[name])]) if name in closed and id(closed[name]) in own else cell
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        )
        by_position = tuple(own.get(id(value), value) for value in defaults)
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, by_position or None, cells or None)
        made.__kwdefaults__ = {name: own.get(id(value), value) for name, value in keywords.items()}
        functools.update_wrapper(made, fn, updated=())
        made.__dict__ = fn.__dict__  # the same object, so that a counter in it counts for all replicas
        return made


def is_function(value: object) -> bool:
    """Whether a value is a function of the user's, a bound method, or a `functools.partial`."""
    return is_users(value) or isinstance(value, (types.MethodType, functools.partial))


def are_alike(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or functions of the same code that use the same objects."""
    if one is other or type(one) is not type(other) or not is_function(one):
        return one is other
    parts, others = _parts(one), _parts(other)
    return len(parts) == len(others) and all(map(are_alike, parts, others))


def _parts(fn: Any) -> list[Any]:
    if isinstance(fn, types.MethodType):
        return [fn.__func__, fn.__self__]
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords, *fn.keywords.values()]
    closed = dict(closed_over(fn))
    return [fn.__code__, *closed, *closed.values(), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def is_users(fn: object) -> TypeGuard[types.FunctionType]:
    """Whether this is a function that is not torch's.

    torch's decorators keep the function that they decorate in several places, so that their functions are left alone.
    """
    return isinstance(fn, types.FunctionType) and fn.__globals__.get("__name__", "").split(".")[0] != "torch"


def deep_copied(value: Any, memo: Mapping[int, Any]) -> Any:
    """A copy made by `copy.deepcopy`, which shares with `value` each lock, file, generator or Python module in it.

    Args:
        value: The value to copy.
        memo: By the id of an object in the value, the object that the copy has in its place.

    Raises:
        Exception: Whatever the copy of a tensor, or of a module, raises.
    """
    shared: dict[int, Any] = {}
    code, own = copy.deepcopy.__code__, copy.deepcopy.__code__.co_varnames[0]  # the variable with what it copies
    while True:
        try:
            return copy.deepcopy(value, {**memo, **shared})
        except Exception as error:
            # The innermost object that was being copied.
            held = [f.f_locals[own] for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code is code][-1]
            if id(held) in shared or isinstance(held, (torch.Tensor, nn.Module)):
                raise
            shared[id(held)] = held
