"""What hooks reach outside of the model, and so may write while replicas run.

A forward hook often keeps what it sees, and the step reads it: on an object, in a dict,
in a list, in a variable of the function around it. Replicas run at the same time, so
each has to have its own of all that. This file finds it: what a hook closes over, its
`self`, the arguments of a `functools.partial`, and whatever these hold.

A hook also reaches what its module calls by a global name. There is one global variable
for all replicas. So the run looks whether somebody has written what is found in this
way, and refuses it by name.

The functions that a step calls are looked at in the same way: see `References.holders`.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections import defaultdict
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._base.distributed_values import DistributedValues
from torchstrategy._base.objects.attribute_contents import (
    OPEN_CONTAINERS,
    cells_in_closure,
    globals_of,
    is_plain_holder,
    named_items,
    names_in,
)
from torchstrategy._base.objects.proxies import is_all_in_dict
from torchstrategy._base.plain import PLAIN, PLAIN_TYPES
from torchstrategy._copies.references.deep_copies import is_users
from torchstrategy._copies.references.step_references import NOT_THE_USERS, package_of

_FUNCTIONS = 5  # how deep calls are followed
# How deep attributes of objects are followed; containers are followed to their end.
_OBJECTS = 4
# A container with more items is one for all replicas, which may not write on it.
MANY = 4096

_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_ARRAYS = (torch.Tensor, np.ndarray)
_NEVER = (
    nn.Module,
    Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    type,
    types.ModuleType,
    DistributedValues,
    *PLAIN,
)
# Objects of Python's own classes, such as locks, queues, loggers and threads, are one
# for all replicas.
_LIBRARIES = (NOT_THE_USERS | sys.stdlib_module_names) - {
    "argparse",
    "collections",
    "types",
}


class Way(enum.Enum):
    """How a function comes to something."""

    OWN = (
        "by what it closes over, its arguments, or an object: a replica's function can "
        "have the replica's own"
    )
    FIXED = (
        "by a function that is one for all replicas, such as a method of a class: only "
        "objects can be proxies there"
    )
    GLOBAL = "by a global name, as a hook"


class Found(NamedTuple):
    """Something that a function reaches."""

    name: str
    thing: Any


@final
class References:
    """What some functions reach.

    Args:
        left_out: The ids of what replicas have copies of anyway, such as the model.
        is_of_step: Whether the functions are a step. What a hook reaches by a global
            name is shared. A replica's step is a function with global names of its own.
            And all methods are looked at, since others call them.
    """

    def __init__(self, left_out: Container[int], is_of_step: bool = False) -> None:
        # By id: objects, containers, variables (cells), and tensors and arrays that
        # hold constant numbers.
        self.things: dict[int, Found] = {}
        # The same, if it is reached in ways only that lead all replicas to one.
        self.shared: dict[int, Found] = {}
        # The ids of those of them that have too many items to be one for each replica.
        self.large: set[int] = set()
        # The ids of what is reached in such a way, whatever else leads there.
        self.reached_as_shared: set[int] = set()
        # Global variables to which a function assigns.
        self.stored: dict[tuple[int, str], dict[str, Any]] = {}
        # By the id of a thing: the ids of the objects, containers and functions that
        # hold it.
        self.holders: defaultdict[int, set[int]] = defaultdict(set)
        self._left_out = left_out
        self._is_of_step = is_of_step
        self._seen: set[tuple[int, Way]] = set()

    def look_at(
        self,
        name: str,
        value: Any,
        way: Way = Way.OWN,
        holder: int = 0,
        functions: int = _FUNCTIONS,
        objects: int = _OBJECTS,
    ) -> None:
        """Records a value and what it holds.

        Args:
            name: What to call it in a message.
            value: The value.
            way: How it is reached.
            holder: The id of what holds it.
            functions: How many calls are followed from here on.
            objects: How many objects are looked into from here on.
        """
        if isinstance(value, (type, types.ModuleType)):
            self._watch(name, value)
        if (
            type(value) in PLAIN_TYPES
            or id(value) in self._left_out
            or isinstance(value, _NEVER)
        ):
            return
        # As `kept.append`: nobody can bind it to another object.
        if isinstance(value, _BOUND):
            self.look_at(name, value.__self__, Way.FIXED, holder, functions, objects)
        elif isinstance(value, _CALLED):
            if functions:
                self._look_into_function(
                    name, value, way, holder, functions - 1, objects
                )
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self.look_at(name, item, way, holder, functions, objects)
        elif isinstance(value, _ARRAYS):
            if is_constant(value):
                self._record(name, value, way, holder)
        elif is_kept(value):
            if way is Way.FIXED and is_all_in_dict(value):
                way = Way.OWN
            if self._record(name, value, way, holder):
                self._look_inside(name, value, way, functions, objects)

    def _watch(self, name: str, thing: type | types.ModuleType) -> None:
        """Notes a class or module of the user's.

        All replicas share its attributes. A module is a Python module.
        """
        package = (
            thing.__name__.partition(".")[0]
            if isinstance(thing, types.ModuleType)
            else package_of(thing)
        )
        if (
            package in _LIBRARIES
            or self._is_of_step
            or (id(thing), Way.FIXED) in self._seen
        ):
            return
        self._seen.add((id(thing), Way.FIXED))
        self.shared.setdefault(id(thing), Found(name, thing))
        if isinstance(thing, type):
            for attribute, held in list(vars(thing).items()):
                if type(held) in OPEN_CONTAINERS:
                    self.look_at(f"{name}.{attribute}", held, Way.FIXED)

    def _record(self, name: str, thing: Any, way: Way, holder: int) -> bool:
        """Notes that something was reached. Returns whether it is to be looked into."""
        self.holders[id(thing)].add(holder)
        is_new = (id(thing), way) not in self._seen
        self._seen.add((id(thing), way))
        if way is Way.OWN:
            self.shared.pop(id(thing), None)
            self.things.setdefault(id(thing), Found(name, thing))
            return is_new
        self.reached_as_shared.add(id(thing))
        if id(thing) not in self.things:
            self.shared.setdefault(id(thing), Found(name, thing))
        return is_new

    def _look_inside(
        self, name: str, value: Any, way: Way, functions: int, objects: int
    ) -> None:
        is_builtin = type(value) in OPEN_CONTAINERS
        if not is_builtin and not objects:
            return
        for cls in () if is_builtin else type(value).__mro__:
            self._watch(cls.__name__, cls)
        items = named_items(value)
        if len(items) > MANY:
            self.things.pop(id(value), None)
            self.shared[id(value)] = Found(name, value)
            self.large.add(id(value))
            return
        for (shown, key), held in items.items():
            left = objects if is_builtin else objects - 1
            self.look_at(
                name + shown.format(key), held, way, id(value), functions, left
            )
        if functions and not is_builtin:
            self._look_into_methods(
                type(value),
                None if self._is_of_step else ["__call__"],
                functions - 1,
                objects,
            )

    def _look_into_function(
        self, name: str, fn: Any, way: Way, holder: int, functions: int, objects: int
    ) -> None:
        if isinstance(fn, functools.partial):
            for value in (*fn.args, *fn.keywords.values()):
                self.look_at(
                    "an argument of functools.partial",
                    value,
                    way,
                    holder,
                    functions,
                    objects,
                )
            self.look_at(name, fn.func, way, holder, functions + 1, objects)
        elif isinstance(fn, types.MethodType):
            # This method itself can be made anew.
            self._seen.add((id(fn.__func__), Way.FIXED))
            self.look_at("self", fn.__self__, way, holder, functions, objects)
            for cls in type(fn.__self__).__mro__:
                self._watch(cls.__name__, cls)
            self._look_into_methods(
                type(fn.__self__), names_in_method(fn), functions, objects
            )
            self.look_at(name, fn.__func__, way, holder, functions + 1, objects)
        elif not is_users(fn):
            compiled = getattr(fn, "_torchdynamo_orig_callable", None)
            if compiled is not None:
                self.look_at(
                    name,
                    compiled,
                    Way.FIXED if way is Way.OWN else way,
                    holder,
                    functions,
                    objects,
                )
        elif package_of(fn) not in NOT_THE_USERS:
            self.holders[id(fn)].add(holder)
            if (id(fn), way) not in self._seen:
                self._seen.add((id(fn), way))
                self._look_into_users_function(fn, way, functions, objects)

    def _look_into_users_function(
        self, fn: types.FunctionType, way: Way, functions: int, objects: int
    ) -> None:
        if has_attributes(fn):
            self.look_at(fn.__name__, fn.__dict__, way, id(fn), functions, objects)
        for variable, cell in cells_in_closure(fn):
            if is_variable_kept(cell, self._left_out):
                self._record(variable, cell, way, id(fn))
            for value in named_items(cell).values():
                self.look_at(variable, value, way, id(fn), functions, objects)
                # As `store.note(output)`: of a step all methods are looked at.
                if functions and not self._is_of_step:
                    self._look_into_methods(
                        type(value), names_in(fn.__code__), functions - 1, objects
                    )
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self.look_at("a default argument", value, way, id(fn), functions, objects)
        stored = stored_globals(fn.__code__)
        for name in stored:
            self.stored[id(fn.__globals__), name] = fn.__globals__
        by_global = Way.GLOBAL
        if self._is_of_step:
            # A replica's step may have global names of its own, unless it assigns to
            # one.
            by_global = Way.FIXED if stored else way
        for name in globals_of(fn):
            self.look_at(
                name, fn.__globals__[name], by_global, id(fn), functions, objects
            )

    def _look_into_methods(
        self, cls: type, names: Iterable[str] | None, functions: int, objects: int
    ) -> None:
        """Looks into methods of a class; `None`: into all.

        All replicas share them.
        """
        for base in cls.__mro__ if functions else ():
            if package_of(base) in _LIBRARIES:
                continue
            for name in list(vars(base)) if names is None else names:
                method = vars(base).get(name)
                if isinstance(method, property):
                    method = method.fget
                if not isinstance(method, types.FunctionType):
                    continue
                self.look_at(name, method, Way.FIXED, 0, functions, objects)
                if names is not None:  # else its other methods are looked at anyway
                    self._look_into_methods(
                        cls, names_in(method.__code__), functions - 1, objects
                    )


def names_in_method(method: types.MethodType) -> tuple[str, ...]:
    """The names of globals and attributes in a method."""
    code = getattr(method.__func__, "__code__", None)
    return () if code is None else names_in(code)


def is_kept(value: object) -> bool:
    """Whether a hook may keep something of a replica's own in a value.

    The value is an object or a container.
    """
    if type(value) in OPEN_CONTAINERS:
        return True
    return package_of(type(value)) not in _LIBRARIES and (
        is_all_in_dict(value) or is_plain_holder(value)
    )


def is_constant(value: Any) -> bool:
    """Whether a tensor or array holds its own numbers: no parameter, no history."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return type(value) is torch.Tensor and not value.requires_grad


def has_attributes(fn: types.FunctionType) -> bool:
    """Whether a function may have attributes in which it keeps something.

    It has some, or knows itself.
    """
    if fn.__dict__.keys() - {"__wrapped__"}:
        return True
    in_variables = chain.from_iterable(
        named_items(cell).values() for _, cell in cells_in_closure(fn)
    )
    return any(value is fn for value in in_variables)


def is_variable_kept(cell: types.CellType, left_out: Container[int]) -> bool:
    """Whether replicas have variables of their own in the place of one.

    It holds no part of a model, and no function.

    A replica's function over a part of a model has the replica's part for good; see
    `deep_copies.ClosureRebinder`.
    """
    for value in named_items(cell).values():
        return id(value) not in left_out and not isinstance(
            value, (*_CALLED, nn.Module, type, types.ModuleType)
        )
    return True


@functools.lru_cache(maxsize=4096)
def stored_globals(code: types.CodeType) -> frozenset[str]:
    """The global variables to which a function assigns, or a function inside it."""
    here = {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    inner = (
        stored_globals(constant)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    )
    return frozenset(chain(here, *inner))
