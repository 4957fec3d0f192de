"""How a replica gets copies of what the user's objects hold.

They are deep copies, and functions over its own objects.

`copy.deepcopy` does not copy functions. A function may close over parts of a model: a
`model.forward = lambda x: model.head(model.body(x))`, a hook or a wrapper. A replica's
copy of the model would have the user's function, which uses the user's own model.
During a run, a proxy leads from this to the replica's model, but not on every thread:
autograd has threads of its own, on which activation checkpoints call such functions
again. So each replica gets functions over its own parts.
"""

from __future__ import annotations

import copy
import functools
import operator
import traceback
import types
from collections.abc import Container, Mapping
from typing import Any, TypeGuard, final

import torch
from torch import nn

from torchstrategy._base.objects.attribute_contents import (
    globals_of,
    variables_in_closure,
)

_DEPTH = 3  # how deep containers are looked into: more than a list of lists is rare


@final
class ClosureRebinder:
    """Makes, of the user's functions, functions that close over a replica's objects.

    Args:
        own: By the id of an object of the user's, the object that the replica has in
            its place. It may have variables of functions (cells), and the `__dict__`s
            of functions.
        with_globals: The ids of the functions that are to have global names of their
            own, in which functions that they call are looked for, too. No other
            functions are made anew. None: no function has such names.
    """

    def __init__(
        self, own: Mapping[int, Any], with_globals: Container[int] | None = None
    ) -> None:
        self._own = own
        self._with_globals = with_globals
        self._made: dict[int, Any] = {}
        self._seen: list[object] = []  # keeps the objects alive whose ids `_made` has

    def rebind(self, value: Any, depth: int = _DEPTH) -> Any:
        """The replica's version of a function, or of a container of functions.

        Other values are returned.

        A function that closes over no part of the model is returned as it is. Lists and
        dicts are changed in place, since they are the replica's own copies already.
        """
        if depth and type(value) is list:
            value[:] = [self.rebind(item, depth - 1) for item in value]
        elif depth and type(value) is dict:
            value.update(
                {key: self.rebind(item, depth - 1) for key, item in value.items()}
            )
        elif depth and type(value) is tuple:
            items = tuple(self.rebind(item, depth - 1) for item in value)
            return (
                value
                if all(new is old for new, old in zip(items, value, strict=True))
                else items
            )
        else:
            return self.rebind_object(value)
        return value

    def rebind_object(self, value: Any) -> Any:
        """The replica's version of an object that a function uses, or of a function.

        Containers are not looked into.
        """
        own = self._own.get(id(value), value)
        if own is not value:
            return own
        if not (
            is_users(value)
            or isinstance(value, (types.MethodType, functools.partial, tuple))
        ):
            return value
        if id(value) not in self._made:
            self._seen.append(value)
            # A function that refers to itself keeps referring to the user's function.
            self._made[id(value)] = value
            self._made[id(value)] = self._rebind_callable(value)
        return self._made[id(value)]

    def _rebind_callable(self, value: Any) -> Any:
        """A new function, method or tuple over the replica's objects.

        It is the same, if it uses none of those.
        """
        if is_users(value):
            return self._rebind_function(value)
        if isinstance(value, types.MethodType):
            function, owner = (
                self.rebind_object(value.__func__),
                self.rebind_object(value.__self__),
            )
            is_same = function is value.__func__ and owner is value.__self__
            return value if is_same else types.MethodType(function, owner)
        if type(value) is functools.partial:
            function, arguments = (
                self.rebind_object(value.func),
                list(map(self.rebind_object, value.args)),
            )
            keywords = {
                name: self.rebind_object(item) for name, item in value.keywords.items()
            }
            used = (value.func, *value.args, *value.keywords.values())
            is_same = all(
                map(operator.is_, (function, *arguments, *keywords.values()), used)
            )
            return (
                value
                if is_same
                else functools.partial(function, *arguments, **keywords)
            )
        if type(value) is not tuple and not hasattr(value, "_fields"):
            return value
        items = list(map(self.rebind_object, value))
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)

    def _rebind_function(self, fn: types.FunctionType) -> types.FunctionType:
        if self._with_globals is not None and id(fn) not in self._with_globals:
            return fn
        names = self._globals_of(fn)
        cells = fn.__closure__ or ()
        defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
        made_cells = [self._rebind_variable(cell, fn) for cell in cells]
        made_defaults = [self.rebind_object(value) for value in defaults]
        made_keywords = {
            name: self.rebind_object(value) for name, value in keywords.items()
        }
        inside = self._own.get(id(fn.__dict__), fn.__dict__)
        used = (*cells, *defaults, *keywords.values(), fn.__dict__, fn.__globals__)
        made_used = (
            *made_cells,
            *made_defaults,
            *made_keywords.values(),
            inside,
            names,
        )
        if all(map(operator.is_, used, made_used)):
            return fn
        itself = [i for i, cell in enumerate(cells) if _is_in(fn, cell)]
        for i in itself:
            made_cells[i] = types.CellType()
        made = types.FunctionType(
            fn.__code__, names, fn.__name__, tuple(made_defaults), tuple(made_cells)
        )
        for i in itself:
            made_cells[i].cell_contents = made
        made.__kwdefaults__ = made_keywords
        functools.update_wrapper(made, fn, updated=())
        # Where it is not the replica's own, it is the same object, so that a counter in
        # it counts for all replicas.
        made.__dict__ = inside
        return made

    def _globals_of(self, fn: types.FunctionType) -> dict[str, Any]:
        """The globals of a replica's function: what differs, over the user's own."""
        if self._with_globals is None:
            return (
                fn.__globals__.users
                if isinstance(fn.__globals__, _Globals)
                else fn.__globals__
            )
        own: dict[str, Any] = {}
        for name in globals_of(fn):
            value = fn.__globals__[name]
            rebound = self.rebind_object(value)
            if rebound is not value:
                own[name] = rebound
        return _Globals(own, fn.__globals__) if own else fn.__globals__

    def _rebind_variable(
        self, cell: types.CellType, fn: types.FunctionType
    ) -> types.CellType:
        """The variable that a replica's function has in the place of one of `fn`.

        `fn` is the user's function.
        """
        own: types.CellType = self._own.get(id(cell), cell)
        if own is not cell or _is_in(fn, cell):
            return own
        try:
            value = cell.cell_contents
        except ValueError:
            return cell  # it is not assigned yet
        held = self.rebind_object(value)
        # A cell whose value is not replaced stays the user's own, so that a counter in
        # it counts for all replicas.
        return cell if held is value else types.CellType(held)


class _Globals(dict[str, Any]):
    """The global names of a function of a replica.

    Python asks `__missing__` for those that are not here.
    """

    def __init__(self, own: Mapping[str, Any], users: dict[str, Any]) -> None:
        super().__init__(own)
        self.users = users

    def __missing__(self, name: str) -> Any:
        return self.users[name]


def _is_in(value: object, cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return False


def is_function(value: object) -> bool:
    """Whether a value is a user's function, a bound method or `functools.partial`."""
    return is_users(value) or isinstance(value, (types.MethodType, functools.partial))


def are_same_function(one: Any, other: Any) -> bool:
    """Whether two values are one object, or functions of one code.

    The functions use the same objects.
    """
    if one is other or type(one) is not type(other) or not is_function(one):
        return one is other
    parts, others = _parts(one), _parts(other)
    return len(parts) == len(others) and all(map(are_same_function, parts, others))


def _parts(fn: Any) -> list[Any]:
    if isinstance(fn, types.MethodType):
        return [fn.__func__, fn.__self__]
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords, *fn.keywords.values()]
    closed = dict(variables_in_closure(fn))
    return [
        fn.__code__,
        *closed,
        *closed.values(),
        *(fn.__defaults__ or ()),
        *(fn.__kwdefaults__ or {}).values(),
    ]


def is_users(fn: object) -> TypeGuard[types.FunctionType]:
    """Whether this is a function that is not torch's, or a decorated one.

    `torch.no_grad` or the like decorates it.

    torch's other decorators keep the function in several places, so that their
    functions are left alone.
    """
    if not isinstance(fn, types.FunctionType):
        return False
    module = fn.__globals__.get("__name__", "")
    return module.split(".")[0] != "torch" or module in _DECORATORS


# Each closes over the function that it decorates.
_DECORATORS = ("torch.utils._contextlib", "torch.amp.autocast_mode")


def deep_copy(value: Any, memo: Mapping[int, Any]) -> Any:
    """A copy made by `copy.deepcopy`.

    It shares with `value` each lock, file, generator or Python module in it.

    Args:
        value: The value to copy.
        memo: By the id of an object in the value, the object that the copy has in its
            place.

    Raises:
        Exception: Whatever the copy of a tensor, or of a module, raises.
    """
    shared: dict[int, Any] = {}
    # The variable with what it copies.
    code, own = copy.deepcopy.__code__, copy.deepcopy.__code__.co_varnames[0]
    while True:
        try:
            return copy.deepcopy(value, {**memo, **shared})
        except Exception as error:
            # `copy.deepcopy` calls itself for what an object holds: the last of its
            # frames has the innermost object.
            frames = [
                frame
                for frame, _ in traceback.walk_tb(error.__traceback__)
                if frame.f_code is code
            ]
            uncopied = frames[-1].f_locals[own]
            if id(uncopied) in shared or isinstance(
                uncopied, (torch.Tensor, nn.Module)
            ):
                raise
            shared[id(uncopied)] = uncopied
