"""The modules, tensors, optimizers and trainers that a step uses by name.

All replicas share a model that was created outside of the scope, and backward in each
replica would add to its one gradient. So the library looks at the step before it runs,
in order to notice such gradients and raise an error.

All replicas also share a learning-rate scheduler or a `GradScaler`, which counts steps.
Those that are found are stepped once for all replicas; see `_copies/replica_steppers`.

A *trainer* is an object of the user's own class that holds models, optimizers,
schedulers or scalers, itself or through another such object. Each replica has its own
version of the attributes that a step writes on it; see `_copies/attributes/trainers`.

The library looks into the functions that the step calls and into the attributes of
objects, both a few levels deep. Objects that a step reaches in other ways are not
found.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._base.objects.attribute_contents import (
    attributes,
    cells_in_closure,
    globals_of,
    variables_in_closure,
)
from torchstrategy._base.plain import PLAIN_TYPES
from torchstrategy._base.types import Tree

STEPPERS = (LRScheduler, torch.amp.GradScaler)

# How deep calls are followed: a step may call a function that calls a function that
# uses the model.
_FUNCTIONS = 4
# How deep attributes are followed: the model may be an attribute of an attribute.
_OBJECTS = 3
# How many items of a list or dict are looked at: a history of losses may be long.
_ITEMS = 256
_FEW = 32  # how many items a list or dict may have for each of them to be looked into

_DATA = {*PLAIN_TYPES, tuple, list, dict, set}

_MAKE_TRAINERS = (nn.Module, Optimizer, *STEPPERS)
_NOT_LOOKED_INTO = (type, types.ModuleType, Optimizer, *PLAIN_TYPES)
NOT_THE_USERS = {
    "torch",
    "torchstrategy",
    "torchvision",
    "torchaudio",
    "numpy",
    "builtins",
}


@final
class TensorPlace:
    """Where a step can replace a tensor that it finds: a name, an item, an attribute.

    Args:
        name: The path by which the step reaches the tensor.
        holder: The cell of a closure, or the dict, list or deque that holds the tensor.
        key: The key or index in the holder. None for a cell.
    """

    def __init__(self, name: str, holder: Any, key: Any = None) -> None:
        self.name = name
        self.holder = holder
        self._key = key

    def read(self) -> object:
        """What is at the place now; None if there is nothing."""
        if isinstance(self.holder, types.CellType):
            with suppress(ValueError):  # the step deleted the name
                return self.holder.cell_contents
            return None
        with suppress(LookupError):
            return self.holder[self._key]
        return None


@final
class StepReferences:
    """The objects that a step uses, most of them with the name by which it does."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []  # leaves that require grad
        # Schedulers and scalers, and bound methods of them.
        self.steppers: list[tuple[str, Any]] = []
        # One that wraps other optimizers comes after these.
        self.optimizers: list[Optimizer] = []
        # Bound methods of optimizers that act once for all replicas: `step`.
        self.updates: list[tuple[str, Any]] = []
        self.others: list[tuple[str, torch.Tensor]] = []  # all other tensors
        # Where the step can put another tensor in the place of one.
        self.places: list[TensorPlace] = []
        # By id: objects that may be trainers, each with its name.
        self._objects: dict[int, tuple[str, Any]] = {}
        # By the id of an object: the ids of the objects that hold it.
        self._holders: defaultdict[int, set[int]] = defaultdict(set)
        # The ids of modules, optimizers and steppers: what holds one is a trainer.
        self._makers: set[int] = set()
        self._seen: set[int] = set()

    def trainers(self) -> list[tuple[str, Any]]:
        """The trainers, each with its name."""
        trainers: set[int] = set()
        found = self._makers
        while found:
            found = (
                set().union(*(self._holders.get(key, ()) for key in found)) - trainers
            )
            trainers |= found
        return [named for key, named in self._objects.items() if key in trainers]

    def look_at(
        self,
        name: str,
        value: Any,
        functions: int,
        objects: int = _OBJECTS,
        holder: int = 0,
    ) -> None:
        """Records a value and the objects in it.

        `holder` is the id of the object of which it is an attribute.
        """
        if isinstance(value, torch.Tensor):
            (
                self.tensors if value.requires_grad and value.is_leaf else self.others
            ).append((name, value))
        elif isinstance(value, _MAKE_TRAINERS):
            self._makers.add(id(value))
            self._holders[id(value)].add(holder)
            self._look_at_part(name, value)
        elif isinstance(value, (list, tuple, dict, deque)):
            self._look_at_items(name, value, objects, holder)
        elif isinstance(value, types.MethodType) and isinstance(
            value.__self__, STEPPERS
        ):
            self.steppers.append((value.__name__, value))
        elif isinstance(value, types.MethodType) and isinstance(
            value.__self__, Optimizer
        ):
            if value.__name__ == "step" or not hasattr(Optimizer, value.__name__):
                self.updates.append((value.__name__, value))
        elif isinstance(
            value, (types.FunctionType, types.MethodType, functools.partial)
        ):
            if functions:
                self._look_into_function(name, value, functions - 1)
        elif not isinstance(value, _NOT_LOOKED_INTO):
            self._look_into_object(name, value, functions, objects, holder)
        elif isinstance(value, type) and package_of(value) not in NOT_THE_USERS:
            self._record_tensors_of_class(name, value)

    def _look_at_part(self, name: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, STEPPERS):
            self.steppers.append((name, value))
            return
        kinds = Optimizer if isinstance(value, Optimizer) else STEPPERS
        if isinstance(value, nn.Module):
            self.modules.append((name, value))
        for attribute, item in list_held(value):
            if isinstance(item, kinds):
                self._look_at_part(f"{name}.{attribute}", item)
        if isinstance(value, Optimizer):
            self.optimizers.append(value)

    def _look_at_items(self, name: str, value: Any, objects: int, holder: int) -> None:
        if isinstance(value, dict):
            self._objects[id(value)] = name, value
            self._holders[id(value)].add(holder)
            holder = id(value)
        are_few = objects > 0 and len(value) <= _FEW
        for key, item in islice(
            value.items() if isinstance(value, dict) else enumerate(value), _ITEMS
        ):
            if isinstance(item, torch.Tensor) and not isinstance(value, tuple):
                self.places.append(TensorPlace(f"{name}[{key!r}]", value, key))
            if are_few or isinstance(
                item, (*_MAKE_TRAINERS, torch.Tensor, types.MethodType)
            ):
                self.look_at(f"{name}[{key!r}]", item, 0, objects - 1, holder)

    def _look_into_object(
        self, name: str, value: Any, functions: int, objects: int, holder: int
    ) -> None:
        self._holders[id(value)].add(holder)
        if (
            objects <= 0
            or id(value) in self._objects
            or package_of(type(value)) in NOT_THE_USERS
        ):
            return
        self._objects[id(value)] = name, value
        self._record_tensors_of_class(name, type(value))
        table = attributes(value)
        for attribute, held in list(table.items()):
            if isinstance(held, torch.Tensor):
                self.places.append(TensorPlace(f"{name}.{attribute}", table, attribute))
            self.look_at(f"{name}.{attribute}", held, 0, objects - 1, id(value))
        if (
            functions
            and callable(value)
            and isinstance(call := type(value).__call__, types.FunctionType)
        ):
            self._look_into_function(name, call, functions - 1)

    def _record_tensors_of_class(self, name: str, cls: type) -> None:
        """Records the tensors that are attributes of a class itself."""
        self.others += [
            (f"{name}.{key}", held)
            for key, held in vars(cls).items()
            if isinstance(held, torch.Tensor)
        ]

    def _look_into_function(self, name: str, fn: Any, functions: int) -> None:
        if isinstance(fn, functools.partial):
            for value in (*fn.args, *fn.keywords.values()):
                self.look_at("an argument of functools.partial", value, functions)
            self.look_at(name, fn.func, functions + 1)
        elif isinstance(fn, types.MethodType):
            self.look_at("self", fn.__self__, 0)
            self.look_at(name, fn.__func__, functions + 1)
        elif id(fn) not in self._seen and package_of(fn) not in NOT_THE_USERS:
            self._seen.add(id(fn))
            names = {key: fn.__globals__[key] for key in globals_of(fn)}
            defaults = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
            unnamed = (("a default argument", value) for value in defaults)
            closed = variables_in_closure(fn)
            self._look_at_assigned(fn, closed, names)
            for found, value in (*closed, *names.items(), *unnamed):
                self.look_at(found, value, functions)

    def _look_at_assigned(
        self,
        fn: types.FunctionType,
        closed: Sequence[tuple[str, Any]],
        names: dict[str, Any],
    ) -> None:
        """Records the names that a function can assign by `nonlocal` and `global`.

        They are names of tensors.
        """
        tensors = [name for name, value in closed if isinstance(value, torch.Tensor)]
        cells = dict(cells_in_closure(fn)) if tensors else {}
        self.places += [TensorPlace(name, cells[name]) for name in tensors]
        for name, value in names.items():
            if isinstance(value, torch.Tensor):
                self.places.append(TensorPlace(name, fn.__globals__, name))


def find_references(
    fn: Callable[..., Any], leaves: Sequence[Tree] = ()
) -> StepReferences:
    """The objects that `fn` uses by name, and those in the leaves of its arguments."""
    found = StepReferences()
    found.look_at("the step", fn, _FUNCTIONS + 1)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            found.look_at("an argument", leaf, 0)
        elif not leaf.requires_grad:
            found.others.append(("an argument", leaf))
    return found


def list_held(thing: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes' values, with names; of a list or tuple, its items."""
    for attribute, held in list(attributes(thing).items()):
        if type(held) not in (list, tuple):
            yield attribute, held
        # Else it would take long.
        elif len(held) <= _ITEMS or not set(map(type, islice(held, _ITEMS))) <= _DATA:
            for item in held:
                yield attribute, item


def package_of(thing: Any) -> str:
    """The package in which a class or function was defined."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0]
