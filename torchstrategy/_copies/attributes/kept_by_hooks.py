"""What hooks keep outside of the model, of which each replica has its own.

A forward hook writes on an object, in a dict, in a list or in a variable of the
function around it, and the step reads it. `hook_references` finds these things. During
a run each replica has its own, which begins as the user's:

    an object of a class of the user's    becomes a proxy, with attributes of its own in
                                          each replica, as a trainer
    a container; a variable (cell)        the replica's hooks, and its step, are
                                          functions over another one
    a tensor or array of constants        the replica has a copy on its device

After the run these become the user's again, by the rule of trainers: see `trainers`. So
the step must come to the replica's own whichever way it goes. What it reaches by a
global name is one for all replicas, unless it is a proxy. There, and where a hook
reaches something by a global name only, a write is refused.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import nn

from torchstrategy._base.devices import memory_device
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.objects.attribute_contents import OPEN_CONTAINERS, names_in
from torchstrategy._base.objects.changes import MISSING
from torchstrategy._base.objects.module_traversal import HOOK_TABLES, held_plainly
from torchstrategy._base.objects.proxies import is_all_in_dict
from torchstrategy._base.plain import PLAIN_TYPES
from torchstrategy._base.torch_internals import GLOBAL_MODULE_HOOKS
from torchstrategy._base.types import Device, Tree
from torchstrategy._base.writes import StepWrites, write_value
from torchstrategy._copies.attributes.trainers import (
    KeptContainer,
    RunReplicas,
    SharedGlobal,
    Trainer,
    Translation,
    global_write_message,
)
from torchstrategy._copies.references.deep_copies import ClosureRebinder, is_function
from torchstrategy._copies.references.hook_references import References, Way
from torchstrategy._copies.references.step_references import package_of
from torchstrategy._copies.tensor_copies import copy_tensors


def hooks_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The hooks on some modules that run in a forward or backward."""
    for module in modules:
        inside = vars(module)
        for table in HOOK_TABLES:
            if inside[table]:
                yield from inside[table].values()


@final
class KeptByHooks:
    """What a model's hooks keep while replicas have the same copies of the model.

    Args:
        modules: The modules.
        known: Further objects of which replicas have copies: parameters and buffers.
        devices: Where the replicas are.

    Attributes:
        own: By replica, by the id of a container, a variable or a tensor of the user's:
            the replica's own. A replica's functions refer to it, so it stays the same
            from run to run.
        hooks: The hooks of the modules.
        is_under_way: Whether a run has these copies.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        known: Iterable[object],
        devices: Sequence[Device],
    ) -> None:
        self.is_under_way = False
        self.hooks = [hook for hook in hooks_of(modules) if not _keeps_nothing(hook)]
        self._left_out = {*map(id, modules), *map(id, known)}
        # Of tensors in plain attributes, and in what these hold, the copies of the
        # modules have copies.
        for module in modules if self.hooks else ():
            self._left_out.update(
                id(held)
                for _, held in held_plainly(module)
                if isinstance(held, torch.Tensor)
            )
        self._devices = [memory_device(device) for device in devices]
        self.own: list[dict[int, Any]] = [{} for _ in devices]
        self._originals: dict[int, Any] = {}  # keeps the ids
        self.look()

    def look(self, others: Sequence[nn.Module] = ()) -> References:
        """Finds what hooks keep now, and makes for each replica what it has not yet.

        Args:
            others: Modules that all replicas share, whose hooks run in replicas, too.
        """
        found = self.reached = References(self._left_out)
        for hook in self.hooks:
            found.look_at("a hook", hook)
        for hook in self._shared_hooks(others):
            found.look_at("a hook", hook, Way.FIXED)
        for key, (_, thing) in found.things.items():
            if key not in self._originals and not is_all_in_dict(thing):
                self._make_own(key, thing)
        return found

    def _shared_hooks(self, others: Iterable[nn.Module]) -> list[Any]:
        """The hooks that are one function for all replicas.

        They are those for all modules, and those of shared modules.
        """
        found: list[Any] = []
        for table in GLOBAL_MODULE_HOOKS:
            found += table.values()
        found += hooks_of(others)
        return [hook for hook in found if not _keeps_nothing(hook)]

    def _make_own(self, key: int, thing: Any) -> None:
        self._originals[key] = thing
        for own, device in zip(self.own, self._devices, strict=True):
            own[key] = _make_thing_like(thing, device)

    def begin(
        self,
        run: RunReplicas,
        calls: Sequence[Any],
        others: Sequence[nn.Module],
        local: Sequence[Mapping[int, Any]],
        users: Callable[[], Mapping[int, Any]],
    ) -> KeptInRun | None:
        """What each replica has in a run; None if hooks reach only the model.

        Args:
            run: The replicas of the run.
            calls: The step and its arguments.
            others: Modules that the step names and that all replicas share.
            local: By replica, by the ids of the user's objects: the objects that the
                replica has in their place.
            users: Returns, by the ids of the replicas' objects, the user's objects in
                their place.
        """
        if not (self.hooks or self._shared_hooks(others)):
            return None
        found = self.look(others)
        if not (found.things or found.shared or found.stored):
            return None
        self._forget_others(found)
        step = References(self._left_out, is_of_step=True)
        holding: set[int] = set()
        if self._originals:
            for call in calls:
                step.look_at("the step", call)
            holding = self._take_holders(found, step)
        tensors = _Arrays(
            {
                key: thing
                for key, thing in self._originals.items()
                if isinstance(thing, _ARRAYS)
            },
            self.own,
            self._devices,
        )
        self.is_under_way = True
        return KeptInRun(
            found, step, holding, self._originals, self.own, tensors, run, local, users
        )

    def _take_holders(self, found: References, step: References) -> set[int]:
        """Adds what holds, in the step, a thing of which each replica has its own.

        It is to hold the replica's own.

        Returns:
            The ids of all that holds such a thing, functions among them.
        """
        holding = new = set(self._originals)
        while new:
            holders = set().union(*(step.holders.get(key, ()) for key in new))
            new = holders - holding
            holding = holding | new
            for key in new & step.things.keys() - found.things.keys():
                found.things[key] = step.things[key]
                thing = step.things[key].thing
                if not is_all_in_dict(thing):
                    self._make_own(key, thing)
        return holding

    def _forget_others(self, found: References) -> None:
        """Drops what the replicas have for things that no hook reaches any more."""
        for key in self._originals.keys() - found.things.keys():
            del self._originals[key]
            for own in self.own:
                del own[key]

    def make_switch(self, in_run: Any, between_runs: Any) -> Any:
        """A replica's hook, which keeps things on the replica's own objects.

        In a run where the replica has none, it keeps them on the user's.

        A backward of the user's, between runs, calls the hooks of replicas, too.
        """
        if in_run is between_runs or not self._originals:
            return between_runs

        @functools.wraps(between_runs)
        def hook(*args: Any, **kwargs: Any) -> Any:
            call = in_run if self.is_under_way else between_runs
            return call(*args, **kwargs)

        return hook

    def map_to_users(self, replica: int) -> dict[int, Any]:
        """By the ids of a replica's things: the user's in their place.

        They are containers, variables and tensors.
        """
        return {id(own): self._originals[key] for key, own in self.own[replica].items()}

    def held_in_copies(self, replica: int) -> dict[int, Any]:
        """By the ids of the user's objects: what a replica has in their place.

        Its copies of the modules hold these.

        An object that becomes a proxy is the user's own in all replicas.
        """
        proxies = {
            key: thing
            for key, (_, thing) in self.reached.things.items()
            if is_all_in_dict(thing)
        }
        return {**proxies, **self.own[replica]}


@final
class KeptInRun(Translation):
    """What each replica has, in one run, for what hooks keep.

    It is translated where it is brought, and brought back.

    Args:
        found: What hooks reach, and what holds that in the step.
        step: What the step reaches.
        holding: The ids of what holds, in the step, something that each replica has for
            itself.
        originals: By their ids: containers, variables, tensors and arrays of the
            user's.
        own: By replica, by the ids of these: the replica's own.
        arrays: The tensors and arrays among them.
        run: The replicas of the run.
        local: By replica, by the ids of the user's objects: the objects that the
            replica has in their place.
        users: Returns, by the ids of the replicas' objects, the user's objects in their
            place.
    """

    def __init__(
        self,
        found: References,
        step: References,
        holding: set[int],
        originals: Mapping[int, Any],
        own: Sequence[Mapping[int, Any]],
        arrays: _Arrays,
        run: RunReplicas,
        local: Sequence[Mapping[int, Any]],
        users: Callable[[], Mapping[int, Any]],
    ) -> None:
        super().__init__(len(own))
        self._own = own
        self._local = local
        self._arrays = arrays
        self._present = run.present
        # By the ids of their components.
        self._made: dict[tuple[int, ...], PerReplica[Any]] = {}
        self._rebinders = [
            ClosureRebinder({**mapping, **others})
            for mapping, others in zip(local, own, strict=True)
        ]
        self._steps = [ClosureRebinder(mapping, holding) for mapping in own]
        # By the id of what a replica has: the user's thing in its place.
        self._back: dict[int, Any] = {}
        for key, thing in originals.items():
            for mapping in own:
                self._back[id(mapping[key])] = thing
        self._users = functools.cache(users)
        self.is_bound = bool(originals)
        self.known = found.things.keys()
        as_shared = found.reached_as_shared | step.reached_as_shared
        self.parts: list[Trainer] = []
        self._named: dict[int, str] = {
            key: name for key, (name, _) in found.things.items()
        }
        self._global_parts: list[tuple[str, KeptContainer]] = []
        for key, (name, thing) in found.things.items():
            if is_all_in_dict(thing):
                self.parts.append(Trainer(thing, run, translation=self))
            elif key in originals and not isinstance(thing, _ARRAYS):
                part = KeptContainer(
                    thing, run, translation=self, own=[mapping[key] for mapping in own]
                )
                self.parts.append(part)
                if key in as_shared:
                    self._global_parts.append((name, part))
        self._global_arrays = [key for key in arrays.known if key in as_shared]
        proxies = {id(part.original) for part in self.parts}
        self.watched: list[SharedGlobal] = []
        for key, (name, thing) in found.shared.items():
            if key not in proxies:
                self.watched.append(
                    SharedGlobal(name, thing, is_large=key in found.large)
                )
        for (_, name), table in found.stored.items():
            self.watched.append(SharedGlobal(name, table, only=frozenset({name})))

    def proxies(self) -> list[Trainer]:
        """The parts that are proxies during the run."""
        return [part for part in self.parts if not isinstance(part, KeptContainer)]

    def bind(self, value: Any, replica: int) -> Any:
        """The step as a replica calls it.

        It is a function over what the replica has in the place of what hooks keep.
        """
        return self._steps[replica].rebind_object(value) if self.is_bound else value

    def select(self, tree: Tree) -> Tree:
        """The arguments of the step, each with what replicas have.

        A `PerReplica` is in the place of what is another thing in each replica.
        """
        if not self.is_bound or type(tree) in PLAIN_TYPES:
            return tree
        if id(tree) in self._own[0]:
            return PerReplica([own[id(tree)] for own in self._own])
        if is_function(tree):
            return PerReplica([self.bind(tree, r) for r in range(self.num_replicas)])
        if type(tree) in (list, tuple):
            return type(tree)(map(self.select, tree))
        if type(tree) is dict:
            return {key: self.select(item) for key, item in tree.items()}
        return tree

    # What a value is in a replica, and the reverse

    def to_replica(self, value: Any, replica: int) -> Any:
        if type(value) in PLAIN_TYPES:
            return value
        value = super().to_replica(value, replica)
        for table in (self._own[replica], self._local[replica]):
            if id(value) in table:
                return table[id(value)]
        if not (isinstance(value, tuple) or is_function(value)):
            return value
        own = self._rebinders[replica].rebind_object(value)
        if own is not value:
            self._back[id(own)] = value  # the rebinder keeps both
        return own

    def to_users(self, value: Any) -> Any:
        if type(value) in PLAIN_TYPES:
            return value
        if id(value) in self._back:
            return self._back[id(value)]
        if isinstance(value, (nn.Module, torch.Tensor)):
            return self._users().get(id(value), value)
        if isinstance(value, tuple) or is_function(value):
            return ClosureRebinder({**self._users(), **self._back}).rebind_object(value)
        return value

    def is_written(self, value: Any, present: Sequence[int]) -> bool:
        return isinstance(value, _ARRAYS) and self._arrays.is_written(value, present)

    def unite(self, value: PerReplica[Any]) -> PerReplica[Any]:
        # What stands in several places of the replicas is one object for the user, too.
        numbers = [*value._components, *value._earlier.values()]
        return self._made.setdefault((*map(id, numbers), *value._earlier), value)

    def merge_array(self, value: Any, of_replicas: Sequence[Any]) -> Any:
        return self._arrays.merge(value, of_replicas)

    # The run

    def refresh(self) -> None:
        """Brings to the replicas what was written on the user's objects for all."""
        for part in self.parts:
            part.refresh()

    def put_together(self) -> None:
        """Makes one of what the replicas wrote, for `write_back`.

        Raises:
            RuntimeError: If a replica wrote on something that a global name leads to.
        """
        for part in self.parts:
            part.put_together()
        for name, written in self._global_parts:
            if written.was_written:
                raise RuntimeError(global_write_message(name))
        for key in self._global_arrays:
            if self._arrays.is_written(self._arrays.known[key], self._present):
                raise RuntimeError(global_write_message(self._named[key]))
        self._arrays.check_merged(self._present, self._named)

    def write_back(self) -> bool:
        """Writes on the user's objects.

        Returns whether somebody may call backward on what was written.
        """
        self._arrays.write_back()
        may_call = [part.write_back() for part in self.parts]
        return any(may_call)

    def let_go(self) -> None:
        """Lets the replicas forget what they keep.

        Their hooks keep things on the user's objects from here on.
        """
        for part in self.parts:
            if isinstance(part, KeptContainer):
                part.drop()
        self.parts.clear()  # they refer to this object
        self._made.clear()


@final
class _Arrays:
    """The tensors and arrays that hooks keep, with those of the replicas.

    They begin a run with the same numbers.
    """

    def __init__(
        self,
        known: Mapping[int, Any],
        own: Sequence[dict[int, Any]],
        devices: Sequence[Device],
    ) -> None:
        self.known = known
        self._own = own
        self._merged: dict[int, Any] = {}
        self._is_merged: set[int] = set()
        tensors = [
            key for key, thing in known.items() if isinstance(thing, torch.Tensor)
        ]
        for mapping, device in zip(own, devices, strict=True):
            for key, thing in known.items():
                mapping[key] = _bring_numbers(thing, mapping[key], device)
        self._index = {key: i for i, key in enumerate(tensors)}
        self._writes = [
            StepWrites([mapping[key] for key in tensors]) for mapping in own
        ]
        self._written: list[set[int]] | None = None

    def is_written(self, thing: Any, present: Sequence[int]) -> bool:
        """Whether a step wrote in place on what replicas have for a tensor or array."""
        key = id(thing)
        if key not in self.known:
            return False
        if isinstance(thing, np.ndarray):
            return any(self._own[r][key].tobytes() != thing.tobytes() for r in present)
        if self._written is None:
            self._written = [writes.written() for writes in self._writes]
        return any(self._index[key] in self._written[r] for r in present)

    def merge(self, thing: Any, of_replicas: Sequence[Any]) -> Any:
        """The user's tensor or array, if all replicas wrote the same numbers on theirs.

        Else it is `MISSING`.
        """
        self._is_merged.add(id(thing))
        there = [value for value in of_replicas if isinstance(value, _ARRAYS)]
        are_own = all(
            any(value is own[id(thing)] for own in self._own) for value in there
        )
        if (
            not there
            or not are_own
            or not all(_are_equal(there[0], value) for value in there[1:])
        ):
            return MISSING
        self._merged[id(thing)] = there[0]
        return thing

    def check_merged(self, present: Sequence[int], names: Mapping[int, str]) -> None:
        """Refuses what differs in a tensor or array that cannot become a `PerReplica`.

        Nothing holds it in which one could be put.

        Raises:
            RuntimeError: Naming it.
        """
        for key, thing in self.known.items():
            if key in self._is_merged or not self.is_written(thing, present):
                continue
            if self.merge(thing, [self._own[r][key] for r in present]) is MISSING:
                raise RuntimeError(
                    _DIFFERS.format(name=names[key], kind=type(thing).__name__)
                )

    def write_back(self) -> None:
        """Writes the numbers on the user's tensors and arrays."""
        for key, value in self._merged.items():
            thing = self.known[key]
            if isinstance(thing, np.ndarray):
                np.copyto(thing, value)
            else:
                write_value(thing, value, False)


_ARRAYS = (torch.Tensor, np.ndarray)


def _make_thing_like(thing: Any, device: Device) -> Any:
    """A new thing for a replica, in the place of one of the user's.

    What it holds is brought when a run begins.
    """
    if isinstance(thing, types.CellType):
        return types.CellType()
    if isinstance(thing, torch.Tensor):
        return copy_tensors([thing], device)[0]
    if type(thing) in OPEN_CONTAINERS or isinstance(thing, np.ndarray):
        return copy.copy(thing)
    kind: Any = type(thing)
    return kind.__new__(kind)


def _bring_numbers(thing: Any, own: Any, device: Device) -> Any:
    """A replica's tensor or array with the user's numbers: `own`, if that can be."""
    if isinstance(thing, np.ndarray):
        if (own.shape, own.dtype) != (thing.shape, thing.dtype):
            return thing.copy()
        np.copyto(own, thing)
        return own
    if own.requires_grad or (own.shape, own.dtype) != (thing.shape, thing.dtype):
        return copy_tensors([thing], device)[0]
    if not _are_equal(own, thing):
        write_value(own, thing, False)
    return own


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    if one.requires_grad or other.requires_grad or one.layout is not torch.strided:
        return False
    other = other.to(one.device)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        one, other
    )


def _keeps_nothing(hook: Any) -> bool:
    """Whether a hook is torch's, or a function that uses nothing but its arguments."""
    if not isinstance(hook, types.FunctionType):
        return package_of(type(hook)) == "torch"
    uses = (
        hook.__closure__,
        hook.__defaults__,
        hook.__kwdefaults__,
        names_in(hook.__code__),
    )
    return package_of(hook) == "torch" or not any(uses)


_DIFFERS = (
    "{name}, a {kind} that a hook was given, has other numbers in each replica after "
    "this run, and nothing holds it in which there could be one for each. Keep it as "
    "an attribute of an object of a class of your own, of which the hook is a method."
)
