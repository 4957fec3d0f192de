"""Functions that close over parts of a model: `model.forward = lambda x: model.head(model.body(x))`, a hook, a wrapper.

`copy.deepcopy` copies no functions, so that of a replica would be the user's, over the user's own model. During a run a
stand-in leads from there to the replica's model, but not on every thread: autograd has threads of its own, where
activation checkpoints call such functions again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, TypeGuard, final

_DEPTH = 3  # a list of lists is as deep as people go


@final
class ClosureRebinder:
    """Finds, for what functions close over, what a replica has of it.

    Args:
        own: By the id of what is the user's, what the replica has.
    """

    def __init__(self, own: Mapping[int, Any]) -> None:
        self._own = own
        self._made: dict[int, Any] = {}
        self._seen: list[object] = []  # what `_made` knows by its id lives as long

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """A value over the replica's own; itself if it is no function, or one that closes over nothing of the model.

        Lists and dicts are the replica's already, and changed in place.
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
        """What the replica has of something that a function holds, or that is a function."""
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
            self._made[id(value)] = value  # a function that names itself goes on with the user's own
            self._made[id(value)] = self._rebound(value)
        return self._made[id(value)]

    def _rebound(self, fn: types.FunctionType) -> types.FunctionType:
        old = dict(closed_over(fn)), fn.__defaults__ or (), fn.__kwdefaults__ or {}
        closed = {name: self._held(value) for name, value in old[0].items()}
        defaults = tuple(map(self._held, old[1]))
        keywords = {name: self._held(value) for name, value in old[2].items()}
        before = (*old[0].values(), *old[1], *old[2].values())
        if all(map(is_, (*closed.values(), *defaults, *keywords.values()), before)):
            return fn
        cells = tuple(
            # A cell in which nothing changes hands stays the user's own: what is counted there is counted for all.
            cell if closed.get(name) is old[0].get(name) else types.CellType(closed[name])
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        )
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults or None, cells or None)
        made.__kwdefaults__ = keywords
        made.__qualname__, made.__module__, made.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
        made.__annotations__ = fn.__annotations__
        made.__dict__ = fn.__dict__  # likewise
        return made


def closed_over(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, by name; nothing of what is not assigned yet."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def is_users(fn: object) -> TypeGuard[types.FunctionType]:
    """Whether this is a function that torch did not make: its decorators keep what they decorate in several places."""
    return isinstance(fn, types.FunctionType) and fn.__globals__.get("__name__", "").split(".")[0] != "torch"
