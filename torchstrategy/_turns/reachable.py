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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._run.metrics import is_metric
from torchstrategy._run.refusals import data_parallel, lazy
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
        # Containers that hold nothing, and tensors without attributes: once they have
        # some, there is more to walk through.
        objects, with_parts = self._objects, {node.position for node in self._nodes}
        bare = [p for p in self.firsts if p not in with_parts]
        self._bare = [p for p in bare if isinstance(objects[p], _FILLED)]
        self._bare_tensors = [p for p in bare if isinstance(objects[p], torch.Tensor)]
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
        details = Details(self, objects)
        self._roles = _Roles.of(self, details, objects)
        reached = self._roles.take(self, objects)
        self.owners = [
            _OF_MODULE
            if key in details.in_modules
            else _OF_OBJECT
            if key in details.in_objects
            else ""
            for key in reached.containers
        ]
        return reached

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
        at = objects.__getitem__
        if any(map(at, self._bare)) or any(
            map(_attributes_of, map(at, self._bare_tensors))
        ):
            return None
        # A tensor with a graph may stand where one without stood, or the other way.
        if not self._roles.fit(objects):
            return None
        return self._roles.take(self, objects)


def _kinds_of(objects: Iterable[Any]) -> list[int]:
    return list(map(id, map(type, objects)))


def _attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {} if is_variable(tensor) else vars(tensor)


_FILLED = (list, dict, set, deque)
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


# Whose a container is.
_OF_MODULE, _OF_OBJECT = "a module", "an object"


@final
@dataclass(eq=False)
class Reached:
    """What a step reaches, for the length of one run.

    Attributes:
        containers: Whose contents are exchanged, by their ids.
        classes: Those of them that are the attributes of classes.
        places: The names that hold one object.
        tensors: The tensors without a graph.
        parameters: The positions of those that are parameters, require grad, or are
            trained by an optimizer.
        trained: The positions of those that an optimizer trains.
        of_modules: The positions of those that a module holds.
        running: The positions of running statistics.
        opaque: Arrays of NumPy, random generators and the like, whose states are
            exchanged.
        acting: What acts once for all replicas.
        iterators: What gives out each item once.
        metrics: The attributes of modules that are metrics.
    """

    containers: dict[int, Container]
    classes: dict[int, type]
    places: list[Place]
    tensors: list[torch.Tensor]
    parameters: list[int]
    trained: set[int]
    of_modules: set[int]
    running: set[int]
    opaque: list[Any]
    acting: list[Any]
    iterators: list[Any]
    metrics: list[dict[str, Any]]
    _walk: Walk
    _objects: Sequence[Any]

    @cached_property
    def in_modules(self) -> set[int]:
        """The ids of containers that belong to a module."""
        return self._owned_by(_OF_MODULE)

    @cached_property
    def in_objects(self) -> set[int]:
        """The ids of containers that belong to another object."""
        return self._owned_by(_OF_OBJECT)

    def _owned_by(self, kind: str) -> set[int]:
        pairs = zip(self.containers, self._walk.owners, strict=True)
        return {key for key, owner in pairs if owner == kind}

    @cached_property
    def details(self) -> Details:
        """What is asked for where something differs, or for a message."""
        return Details(self._walk, self._objects)


@final
class Details:
    """What each object that was found is, and what the user calls it.

    Args:
        walk: How it was found.
        objects: The objects on this way.

    Attributes:
        in_modules: The ids of containers that belong to a module.
        in_objects: The ids of containers that belong to another object.
        kinds: The classes of modules, by the ids of their attributes and tables.
    """

    def __init__(self, walk: Walk, objects: Sequence[Any]) -> None:
        self._walk, self._objects = walk, objects
        self.containers: dict[int, Container] = {}
        self.classes: dict[int, type] = {}
        # Cells, globals and slots, as `_Roles` has them.
        self.cells: list[tuple[int, int, str]] = []
        self.names: list[tuple[int, str, str]] = []
        self.slots: list[tuple[int, int]] = []
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
        elif issubclass(cls, _FILLED):
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
        position = self._position_of[id(fn)]
        for i, cell in enumerate(fn.__closure__ or ()):
            if id(cell) not in self._position_of:
                self._position_of[id(cell)] = position
                self.cells.append((position, i, fn.__code__.co_freevars[i]))
        if is_installed(fn.__module__):
            return
        names = names_in(fn.__code__)
        inside = fn.__globals__
        for name in names.stored:
            self._take_global(position, inside, name)
        for name in names.used:
            value = inside.get(name)
            if type(value) is types.ModuleType and not is_installed(value.__name__):
                for inner in names.attributes:
                    self._take_global(position, vars(value), inner, name)
        table = vars(fn)
        self.containers[id(table)] = table

    def _take_global(
        self, position: int, inside: dict[str, Any], name: str, file: str = ""
    ) -> None:
        key = id(inside), name
        if key not in self._globals:
            self._globals.add(key)
            self.names.append((position, name, file))

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
        position = self._position_of[id(thing)]
        self.slots.extend((position, i) for i in range(len(slots_of(cls))))

    def _refuse(self, module: nn.Module, inside: dict[str, Any]) -> None:
        name = self.name_of(module) or type(module).__name__
        if isinstance(module, nn.DataParallel):
            raise TypeError(data_parallel(name))
        for own, parameter in inside["_parameters"].items():
            if parameter is not None and nn.parameter.is_lazy(parameter):
                kind = type(module).__name__
                raise TypeError(lazy(f"{name}.{own}", kind))

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


@final
class _Roles(NamedTuple):
    """What is what on a way, by the positions on it.

    With this, a run that goes the same way again does not look at each object.
    """

    containers: list[int]  # which are exchanged themselves
    tables: list[int]  # the objects whose attributes are exchanged
    classes: list[int]
    acting: list[int]
    cells: list[tuple[int, int, str]]  # a function, and a cell of its closure
    names: list[tuple[int, str, str]]  # a function, and a global; of a file, its name
    slots: list[tuple[int, int]]  # an object, and which of its slots
    tensors: list[int]
    with_graphs: list[int]
    opaque: list[int]
    iterators: list[int]
    metrics: list[int]
    parameters: list[int]
    trained: set[int]
    of_modules: set[int]
    running: set[int]

    @classmethod
    def of(cls, walk: Walk, details: Details, objects: Sequence[Any]) -> _Roles:
        """Learns the roles from what was found by looking at each object."""
        position_of = {id(objects[p]): p for p in walk.firsts}
        containers = [p for p in walk.firsts if id(objects[p]) in details.containers]
        classes = [p for p in containers if id(objects[p]) in details.classes]
        taken = {id(one) for one in details.tensors}
        tables, graphs, metrics = [], [], []
        for p in walk.firsts:
            table = dict_of(objects[p])
            if table is not None and id(table) in details.containers:
                tables.append(p)
                is_collection = table.keys() >= {"_groups", "_groups_checked"}
                if isinstance(objects[p], nn.Module) and (
                    is_metric(table) or is_collection
                ):
                    metrics.append(p)
            if isinstance(objects[p], torch.Tensor) and id(objects[p]) not in taken:
                graphs.append(p)
        return cls(
            containers=[p for p in containers if p not in set(classes)],
            tables=tables,
            classes=classes,
            acting=[position_of[id(one)] for one in details.acting],
            cells=details.cells,
            names=details.names,
            slots=details.slots,
            tensors=[position_of[id(one)] for one in details.tensors],
            with_graphs=[p for p in graphs if not is_variable(objects[p])],
            opaque=[position_of[id(one)] for one in details.opaque],
            iterators=[position_of[id(one)] for one in details.iterators],
            metrics=metrics,
            parameters=details.parameters,
            trained=details.trained,
            of_modules=details.of_modules,
            running=details.running,
        )

    def fit(self, objects: Sequence[Any]) -> bool:
        """Whether tensors have graphs where they had."""
        return all(objects[p].grad_fn is None for p in self.tensors) and not any(
            objects[p].grad_fn is None for p in self.with_graphs
        )

    def take(self, walk: Walk, objects: Sequence[Any]) -> Reached:
        """What is on the way, by the roles."""
        at = objects.__getitem__
        acting = list(map(at, self.acting))
        found = list(map(at, self.containers))
        found += map(_table_of, map(at, self.tables))
        for thing in acting:
            if "param_groups" in vars(thing):
                groups = groups_of(thing)
                found += (groups, *groups, *(group["params"] for group in groups))
        containers = dict(zip(map(id, found), found, strict=True))
        classes = {id(cls): cls for cls in map(at, self.classes)}
        containers.update((key, vars(cls)) for key, cls in classes.items())
        return Reached(
            containers=containers,
            classes=classes,
            places=self._places(objects),
            tensors=list(map(at, self.tensors)),
            parameters=self.parameters,
            trained=self.trained,
            of_modules=self.of_modules,
            running=self.running,
            opaque=list(map(at, self.opaque)),
            acting=acting,
            iterators=list(map(at, self.iterators)),
            metrics=[vars(objects[p]) for p in self.metrics],
            _walk=walk,
            _objects=objects,
        )

    def _places(self, objects: Sequence[Any]) -> list[Place]:
        places = [Place(objects[p].__closure__[i], name) for p, i, name in self.cells]
        for p, name, file in self.names:
            inside = objects[p].__globals__
            places.append(Place(vars(inside[file]) if file else inside, name))
        for p, i in self.slots:
            name, member = slots_of(type(objects[p]))[i]
            places.append(Place(objects[p], name, member))
        return places


def _table_of(thing: Any) -> dict[str, Any]:
    table: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    return table
