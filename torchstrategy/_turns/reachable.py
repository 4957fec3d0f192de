"""One walk: the mutable objects that a step reaches.

What the walk finds is what images are images of. It goes from the step, its arguments
and the objects of the scope through attributes, items, closures, defaults and the
globals that functions name. It looks at attributes of objects of any class that is not
Python's or torch's own, and into functions that are not installed: the globals of an
installed package belong to that package.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._turns import refusals
from torchstrategy._turns.held import Container
from torchstrategy._turns.opaque import can_exchange, is_opaque
from torchstrategy._turns.parts import (
    ACTING,
    CLOSED,
    MISSING,
    dict_of,
    groups_of,
    has_attributes_of_program,
    is_closed,
    is_installed,
    is_plain_container,
    names_in,
    parts_of,
    read_cell,
    read_slot,
    slots_of,
)
from torchstrategy._variables.variable import is_variable


class Place(NamedTuple):
    """A name that holds one object: a variable of a closure, a global, or a slot."""

    owner: Any  # the cell, the globals, or the object that has the slot
    name: str
    member: Any = None  # the descriptor of a slot

    def read(self) -> Any:
        """What it holds; `MISSING` if nothing was assigned."""
        if self.member is not None:
            return read_slot(self.owner, self.member)
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, MISSING)
        return read_cell(self.owner)

    def write(self, value: Any) -> None:
        """Lets it hold something else, or nothing."""
        if self.member is not None:
            if value is not MISSING:
                self.member.__set__(self.owner, value)
            elif self.read() is not MISSING:
                self.member.__delete__(self.owner)
        elif isinstance(self.owner, dict):
            if value is not MISSING:
                self.owner[self.name] = value
            else:
                self.owner.pop(self.name, None)
        elif value is not MISSING:
            self.owner.cell_contents = value
        elif self.read() is not MISSING:
            del self.owner.cell_contents


Roots = Sequence[tuple[str, Any]]  # where a walk begins, with what the user calls it


class _Node(NamedTuple):
    """How a run finds again what an object holds."""

    position: int  # of the object
    values: Callable[[Any], Sequence[Any]]
    is_open: list[bool]  # of each value: whether it is looked into
    is_closed: list[bool]


# Note [Nothing of the program's is kept between runs]
# A walk takes milliseconds, and most runs of a step reach what the one before has
# reached. So the walk is noted, and a run goes the same way again: it asks the same
# objects for what they hold, in the same order, and compares ids and classes. Only the
# numbers and names of this way are kept between runs. A model that the program drops is
# freed, as if there had been no run.
@final
class Walk:
    """The way from the roots to all that a step reaches.

    Args:
        roots: Where it begins.
    """

    def __init__(self, roots: Roots) -> None:
        self.names = [name for name, _ in roots]
        self.parents = [-1] * len(roots)
        self._nodes: list[_Node] = []
        self._objects: list[Any] = [thing for _, thing in roots]
        seen: dict[int, int] = {}
        # What is found first, in the order of a reader: depth first.
        self.firsts: list[int] = []
        todo = list(reversed(range(len(roots))))
        while todo:
            position = todo.pop()
            thing = self._objects[position]
            if id(thing) in seen or type(thing) in CLOSED:
                continue
            seen[id(thing)] = position
            self.firsts.append(position)
            todo += reversed(self._look_into(position, thing))
        self._ids = list(map(id, self._objects))
        self._kinds = _kinds_of(self._objects)
        # Another object of the same class may stand here: what it holds is compared.
        self._is_checked = [not isinstance(o, _REPLACED) for o in self._objects]
        self._checked_ids = list(compress(self._ids, self._is_checked))
        self._num_roots = len(roots)
        # For each position, the first one of the same object: a tied weight stays tied.
        self._first_of = [seen.get(key, p) for p, key in enumerate(self._ids)]

    def _look_into(self, position: int, thing: Any) -> Sequence[int]:
        parts = parts_of(type(thing))
        values = parts.values(thing)
        if not values:
            return ()
        is_open = [type(value) not in CLOSED for value in values]
        self._nodes.append(
            _Node(position, parts.values, is_open, list(map(not_, is_open)))
        )
        names = compress(parts.names(thing), is_open)
        first = len(self._objects)
        self._objects += compress(values, is_open)
        self.names += names
        self.parents += [position] * (len(self._objects) - first)
        return range(first, len(self._objects))

    def take(self) -> Reached:
        """What was found. The walk does not keep it."""
        objects, self._objects = self._objects, []
        return Reached(self, objects)

    def go(self, roots: Roots) -> Reached | None:
        """Goes the same way again; None if something is not as it was."""
        objects = [thing for _, thing in roots]
        if len(objects) != self._num_roots:
            return None
        closed: list[Any] = []
        kinds = self._kinds
        for position, values_of, is_open, is_other in self._nodes:
            thing = objects[position]
            if id(type(thing)) != kinds[position]:
                return None
            values = values_of(thing)
            if len(values) != len(is_open):
                return None
            objects += compress(values, is_open)
            closed += compress(values, is_other)
        if (
            len(objects) != len(self._ids)
            or _kinds_of(objects) != self._kinds
            or not CLOSED.issuperset(map(type, closed))
        ):
            return None
        ids = list(map(id, objects))
        if list(compress(ids, self._is_checked)) != self._checked_ids:
            return None
        if list(map(ids.__getitem__, self._first_of)) != ids:
            return None
        if len({ids[p] for p in self.firsts}) != len(self.firsts):
            return None
        return Reached(self, objects)


def _kinds_of(objects: Iterable[Any]) -> list[int]:
    return list(map(id, map(type, objects)))


_REPLACED = (
    types.FunctionType,
    types.MethodType,
    torch.Tensor,
    tuple,
    frozenset,
    staticmethod,
    classmethod,
    property,
)


@final
class Reached:
    """What a step reaches, for the length of one run.

    Args:
        walk: How it was found.
        objects: The objects on this way.

    Attributes:
        containers: Whose contents are exchanged, by their ids.
        classes: Those of them that are the attributes of classes.
        places: The names that hold one object.
        tensors: The tensors without a graph.
        parameters: The positions of those that require grad, or that an optimizer
            trains.
        trained: The positions of those that an optimizer trains.
        of_modules: The positions of those that a module holds.
        running: The positions of running statistics.
        opaque: Arrays of NumPy, random generators and the like, whose states are
            exchanged.
        acting: What acts once for all replicas.
        iterators: What gives out each item once.
        in_modules: The ids of containers that belong to a module.
        in_objects: The ids of containers that belong to another object.
        kinds: The classes of modules, by the ids of their attributes and buffers.
    """

    def __init__(self, walk: Walk, objects: Sequence[Any]) -> None:
        self._walk, self._objects = walk, objects
        self.containers: dict[int, Container] = {}
        self.classes: dict[int, type] = {}
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []
        self.of_modules: set[int] = set()
        self.running: set[int] = set()
        self.opaque: list[Any] = []
        self.acting: list[Any] = []
        self.iterators: list[Any] = []
        self.in_modules: set[int] = set()
        self.in_objects: set[int] = set()
        self.kinds: dict[int, str] = {}
        self._position_of: dict[int, int] = {}
        self._statistics: set[int] = set()  # the ids of running statistics
        self._of_tensors: dict[int, int] = {}  # by their ids, the positions of tensors
        self._globals: set[tuple[int, str]] = set()
        for position in walk.firsts:
            self._take(position, objects[position])
        self._take_parameters()

    def _take(self, position: int, thing: Any) -> None:
        self._position_of[id(thing)] = position
        cls = type(thing)
        if issubclass(cls, torch.Tensor):
            self._take_tensor(position, thing)
        elif issubclass(cls, types.FunctionType):
            self._take_function(thing)
        elif is_opaque(cls):
            self._take_opaque(position, thing)
        elif issubclass(cls, ACTING):
            self.acting.append(thing)
            if isinstance(thing, Optimizer) and "param_groups" in vars(thing):
                groups = groups_of(thing)
                for held in (groups, *groups, *(group["params"] for group in groups)):
                    self.containers[id(held)] = held
                    self.in_objects.add(id(held))
                    self._position_of[id(held)] = position
        elif issubclass(cls, type):
            if has_attributes_of_program(thing):
                self.containers[id(thing)] = vars(thing)
                self.classes[id(thing)] = thing
        elif issubclass(cls, (tuple, frozenset)):
            self._note_holder(position, thing)
        elif issubclass(cls, (dict, list, set)) or cls.__name__ == "deque":
            self._take_container(position, thing)
        else:
            if hasattr(cls, "__next__"):
                self.iterators.append(thing)
            if not is_closed(cls):
                self._take_attributes(thing)

    def _take_tensor(self, position: int, tensor: torch.Tensor) -> None:
        if is_variable(tensor):
            if tensor.requires_grad:
                self._of_tensors[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            return
        if tensor.grad_fn is None:
            index = self._of_tensors[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            if self._holder_id(position) in self.in_modules:
                self.of_modules.add(index)
            if id(tensor) in self._statistics:
                self.running.add(index)
        table = vars(tensor)
        self.containers[id(table)] = table
        self.in_objects.update((id(tensor), id(table)))

    def _take_function(self, fn: types.FunctionType) -> None:
        for name, cell in zip(
            fn.__code__.co_freevars, fn.__closure__ or (), strict=True
        ):
            if id(cell) not in self._position_of:
                self._position_of[id(cell)] = self._position_of[id(fn)]
                self.places.append(Place(cell, name))
        if is_installed(fn.__module__):
            return
        names = names_in(fn.__code__)
        inside = fn.__globals__
        for name in names.stored:
            self._take_global(inside, name)
        for name in names.used:
            value = inside.get(name)
            if type(value) is types.ModuleType and not is_installed(value.__name__):
                for inner in names.attributes:
                    if inner in vars(value):
                        self._take_global(vars(value), inner)
        table = vars(fn)
        self.containers[id(table)] = table

    def _take_global(self, inside: dict[str, Any], name: str) -> None:
        key = id(inside), name
        if key not in self._globals:
            self._globals.add(key)
            self.places.append(Place(inside, name))

    def _take_opaque(self, position: int, thing: Any) -> None:
        # A generator that no module has is one for all replicas, which draw from it one
        # after the other.
        is_own = isinstance(thing, (np.ndarray, bytearray)) or (
            self._holder_id(position) in self.in_modules
        )
        if is_own and can_exchange(thing):
            self.opaque.append(thing)

    def _take_container(self, position: int, container: Any) -> None:
        cls = type(container)
        if not is_plain_container(cls):
            if not is_closed(cls):
                self._take_attributes(container)
            return
        self.containers[id(container)] = container
        self._note_holder(position, container)
        if cls.__module__ not in ("builtins", "collections"):
            self._take_attributes(container)

    def _note_holder(self, position: int, container: Any) -> None:
        """What a container of a module holds is of the module, too."""
        holder = self._holder_id(position)
        for known in (self.in_modules, self.in_objects):
            if holder in known:
                known.add(id(container))

    def _holder_id(self, position: int) -> int:
        parent = self._walk.parents[position]
        return 0 if parent < 0 else id(self._objects[parent])

    def _take_attributes(self, thing: Any) -> None:
        """Takes what an object of another kind has in attributes and slots."""
        cls = type(thing)
        table = dict_of(thing)
        if table is not None:
            self.containers[id(table)] = table
            self._position_of.setdefault(id(table), self._position_of[id(thing)])
            if issubclass(cls, nn.Module):
                self._refuse(thing, table)
                self.in_modules.update((id(thing), id(table)))
                buffers = table.get("_buffers") or {}
                tables = (table.get("_parameters"), table.get("_modules"))
                for part in (table, thing, buffers, *tables):
                    self.kinds[id(part)] = cls.__name__
                for name in ("running_mean", "running_var"):
                    if buffers.get(name) is not None:
                        self._statistics.add(id(buffers[name]))
            else:
                self.in_objects.update((id(thing), id(table)))
        self.places += [Place(thing, name, member) for name, member in slots_of(cls)]

    def _refuse(self, module: nn.Module, inside: dict[str, Any]) -> None:
        name = self.name_of(module) or type(module).__name__
        if isinstance(module, nn.DataParallel):
            raise TypeError(refusals.data_parallel(name))
        for own, parameter in inside["_parameters"].items():
            if parameter is not None and nn.parameter.is_lazy(parameter):
                kind = type(module).__name__
                raise TypeError(refusals.lazy(f"{name}.{own}", kind))

    def _take_parameters(self) -> None:
        """Optimizers may train tensors that a step has frozen for now."""
        optimized = {
            id(parameter)
            for thing in self.acting
            if isinstance(thing, Optimizer)
            for group in groups_of(thing)
            for parameter in group["params"]
        }
        self.trained = {i for key, i in self._of_tensors.items() if key in optimized}
        self.parameters = [
            i
            for i, tensor in enumerate(self.tensors)
            if i in self.trained
            or isinstance(tensor, nn.Parameter)
            or (tensor.requires_grad and tensor.is_leaf)
        ]

    # Names for messages

    def name_of(self, thing: Any) -> str:
        """What the user calls an object that was found; empty if nobody knows."""
        return self.name_of_id(id(thing))

    def name_of_id(self, key: int) -> str:
        """The same, by the id of the object."""
        name, position = "", self._position_of.get(key, -1)
        # What has a name of its own, such as a global, needs no path.
        while position >= 0 and (not name or name[0] in ".["):
            name = self._walk.names[position] + name
            position = self._walk.parents[position]
        return _IN_TABLES.sub(r".\2", name).lstrip(".")

    def name_in(self, holder: int, name: str) -> str:
        """How messages call what a container holds by a name."""
        kind = self.kinds.get(holder)
        if kind is None:
            path = self.name_of_id(holder)
            return f"{path}.{name}" if path else name
        return f"buffer {kind}.{name}" if self.is_buffers(holder) else f"{kind}.{name}"

    def shown(self, thing: Any) -> str:
        """How messages call an object: a buffer by the class of its module."""
        position = self._position_of.get(id(thing), -1)
        if position >= 0 and self._holder_id(position) in self.kinds:
            name = self._walk.names[position].strip(".[]'\"")
            return self.name_in(self._holder_id(position), name)
        return self.name_of(thing)

    def is_hooks(self, key: int) -> bool:
        """Whether a container is a table of hooks of a module."""
        position = self._position_of.get(key, -1)
        return (
            position >= 0
            and self._walk.names[position].endswith("_hooks")
            and self._holder_id(position) in self.kinds
        )

    def is_buffers(self, key: int) -> bool:
        """Whether a container is the table of a module's buffers."""
        position = self._position_of.get(key, -1)
        return position >= 0 and self._walk.names[position] == "._buffers"


# How a module holds what the user calls `module.name`.
_IN_TABLES = re.compile(r"\._(modules|parameters|buffers)\['([^']*)'\]")
