"""The plain attributes of the user's modules, with what they hold.

They are in the user's modules and in the replicas' copies.

A plain attribute may hold a configuration, a list of numbers or an object that counts.
Replicas have copies of these. What a program sets on a tensor, as in `weight.is_expert
= True`, is a plain attribute, too: that of a parameter, of a buffer, or of a tensor in
a plain attribute.

What the user changes in them between runs reaches the copies before the next run. What
steps write on the copies becomes one value for the user's modules after the run: see
`merged_values`. The copies get it before the next run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from itertools import chain
from operator import is_
from typing import Any, final

import torch

from torchstrategy._base.distributed_values import ABSENT, PerReplica
from torchstrategy._base.memory import memory_id
from torchstrategy._base.objects import attribute_contents as contents
from torchstrategy._base.objects.attribute_contents import ATTRIBUTE, CopiedThing
from torchstrategy._base.objects.changes import MISSING, Edit, Snapshot, edits_of
from torchstrategy._base.objects.module_traversal import (
    TABLES,
    TORCHS_OWN,
    computed_by_hooks,
)
from torchstrategy._base.objects.proxies import plain_class
from torchstrategy._base.plain import PLAIN
from torchstrategy._base.types import Device
from torchstrategy._base.writes import (
    StepWrites,
    TrackedTensors,
    bring_value,
    write_value,
)
from torchstrategy._copies.attributes.attribute_tables import (
    AttributesOfTensors,
    by_path,
    tables_of_tensors,
)
from torchstrategy._copies.attributes.late_attributes import Later
from torchstrategy._copies.attributes.merged_values import Items, Look, ModuleMerger
from torchstrategy._copies.modules.module_replica import (
    ModuleReplica,
    Originals,
    uncopyable_error,
)
from torchstrategy._copies.modules.waiting_attributes import WaitingAttributes
from torchstrategy._copies.refusals import refuse_trainable
from torchstrategy._group.participants import Participants
from torchstrategy._run.metrics import states_of


@final
@dataclass(eq=False)
class PlainAttributes:
    """The plain attributes of the user's modules and tensors.

    With them are the containers and tensors that they hold.

    Args:
        replicas: The copies of the modules in each replica.
        originals: What they are copies of. Other code keeps the values of parameters
            and buffers in step. What hooks keep is not looked at here, also if an
            attribute holds it.
        paths: What to call each of the user's modules.
        names: What to call each of the user's parameters.
        buffer_names: What to call each of the user's buffers.
        device: Where the user's parameters are.
    """

    replicas: Sequence[ModuleReplica]
    originals: InitVar[Originals]
    paths: InitVar[Sequence[str]]
    names: InitVar[Sequence[str]]
    buffer_names: Sequence[str]
    device: Device

    def __post_init__(
        self, originals: Originals, paths: Sequence[str], names: Sequence[str]
    ) -> None:
        modules, owners = originals.modules, originals.parameters.tensors
        self.buffers = originals.buffers
        self.kept = originals.kept
        self.parameters = set(map(id, owners))
        # No reference to the tensors themselves: those that are in no module live as
        # long as the user holds them.
        self._of_parameters = tables_of_tensors(
            names, owners, [replica.parameters for replica in self.replicas]
        )
        insides = zip(
            paths,
            [module.__dict__ for module in modules],
            *(r.insides for r in self.replicas),
            strict=True,
        )
        # All that may change has a path of its own, and is known by it.
        self._modules = by_path(
            CopiedThing(path, inside, local) for path, inside, *local in insides
        )
        of_paths = dict(zip(self._modules, modules, strict=True))
        self._of_packages = {
            path for path, module in of_paths.items() if _is_of_package(module)
        }
        # The attributes that hooks compute, in each replica for itself.
        self._computed = {
            path: computed_by_hooks(module) for path, module in of_paths.items()
        }
        # The states of metrics, which `metrics` brings to the replicas and back.
        self._states = {
            path: states_of(place.original) for path, place in self._modules.items()
        }
        self._left_out = {
            path: _TORCHS.union(self._computed[path], self._states[path])
            for path in self._modules
        }
        self._known_modules = Snapshot(
            {path: place.original for path, place in self._modules.items()}
        )
        own = [
            dict(zip(self._modules, replica.insides, strict=True))
            for replica in self.replicas
        ]
        self._known_insides = [Snapshot(of_replica, TABLES) for of_replica in own]
        self._backups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._collect_fixed_tables()
        copied = {
            path: [r.local_objects[id(module)] for r in self.replicas]
            for path, module in of_paths.items()
        }
        self._late = WaitingAttributes(
            self._modules, copied, originals.late, self._take_brought
        )
        self._collect()

    def _collect(self) -> None:
        """Lists all containers and tensors that the attributes hold.

        The copies have to agree with the user's now.
        """
        places, leaves, self._others = contents.find_copied_things(
            self._list_attributes()
        )
        for key in places.keys() & self.kept.own[0].keys():
            del places[key]
        # The ids of the parameters and buffers that attributes hold.
        self.known_held = leaves.keys() & {
            *self.parameters,
            *map(id, self.buffers.tensors),
        }
        self._leaves = by_path(
            leaf for key, leaf in leaves.items() if key not in self.known_held
        )
        self._collect_tables()
        all_places = (
            by_path(chain(self._tables.values(), places.values())) if places else {}
        )
        self._containers = {
            path: place
            for path, place in all_places.items()
            if path not in self._tables
        }
        self._known_things = [*places.values(), *leaves.values(), *self._others]
        # The user's tensors that attributes hold, other than parameters and buffers.
        self.tensors = TrackedTensors(leaf.original for leaf in self._leaves.values())
        self.tensors.watch()
        self._known = Snapshot(
            {path: place.original for path, place in self._containers.items()}
        )
        self._held = [place.original for place in self._containers.values()]
        self._held_here = [place.local[0] for place in self._containers.values()]
        self._late.brought = []
        # The containers with which the copies do not agree, whatever they hold.
        self._unbrought: set[str] = set()
        count = range(len(self.replicas))
        self._known_local = [
            Snapshot({path: one.local[r] for path, one in self._containers.items()})
            for r in count
        ]
        self._writes = [
            StepWrites([leaf.local[r] for leaf in self._leaves.values()]) for r in count
        ]

    def take_new_buffers(self) -> None:
        """Says that replicas have other tensors in the place of buffers.

        They have to agree with the user's now.
        """
        self._collect_fixed_tables()
        self._collect_tables()

    def _collect_fixed_tables(self) -> None:
        """Lists the attributes of modules, parameters and buffers."""
        of_replicas = [replica.buffers.tensors for replica in self.replicas]
        self._users_buffers = list(self.buffers.tensors)
        self._of_buffers = tables_of_tensors(
            self.buffer_names, self._users_buffers, of_replicas
        )
        self._list_users_tables()
        self._fixed_tables = by_path(
            chain(self._modules.values(), self._of_parameters, self._of_buffers)
        )

    def _list_users_tables(self) -> None:
        self._users_tables = [
            table.original for table in (*self._of_parameters, *self._of_buffers)
        ]

    def _collect_tables(self) -> None:
        """Lists what has attributes: modules and tensors, each as its `__dict__`."""
        self._tables = dict(self._fixed_tables)
        if self._leaves:
            of_replicas = [
                [leaf.local[r] for leaf in self._leaves.values()]
                for r in range(len(self.replicas))
            ]
            of_leaves = tables_of_tensors(
                list(self._leaves),
                [leaf.original for leaf in self._leaves.values()],
                of_replicas,
            )
            self._tables = by_path(chain(self._fixed_tables.values(), of_leaves))
        tensors = {
            path: table
            for path, table in self._tables.items()
            if path not in self._modules
        }
        self._known_tensors = AttributesOfTensors(
            {path: table.original for path, table in tensors.items()}
        )
        count = range(len(self.replicas))
        self._known_tensors_local = [
            AttributesOfTensors({path: one.local[r] for path, one in tensors.items()})
            for r in count
        ]

    def _list_attributes(self) -> Iterator[CopiedThing]:
        """The plain attributes of all modules, parameters and buffers."""
        marked = [
            table
            for table in (*self._of_parameters, *self._of_buffers)
            if table.original
        ]
        for path, inside, of_replicas in (*self._modules.values(), *marked):
            left_out = self._left_out.get(path, frozenset())
            for name in [name for name in inside if name not in left_out]:
                local = [of_replica.get(name, MISSING) for of_replica in of_replicas]
                is_everywhere = not any(
                    value is MISSING or type(value) is Later for value in local
                )
                if (
                    is_everywhere
                    and type(inside[name]) not in PLAIN
                    and id(inside[name]) not in self.parameters
                ):
                    yield CopiedThing(f"{path}.{name}", inside[name], local)

    def _are_known(self, owners: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors have the `__dict__`s that they had.

        `torch.utils.swap_tensors` exchanges these, too.
        """
        return all(
            map(is_, map(vars, chain(owners, self._users_buffers)), self._users_tables)
        )

    def replace_buffer(self, index: int, after: torch.Tensor) -> None:
        """After a run: the user has a new tensor for a buffer, as the step made it."""
        vars(after).update(self._of_new_buffers.get(index, {}))
        self._users_buffers[index] = after
        self._of_buffers[index] = self._of_buffers[index]._replace(original=vars(after))
        self._list_users_tables()

    def bring(self, owners: Sequence[torch.Tensor]) -> bool:
        """Before a run: brings what the user changed to the copies.

        False if the copies have to be made anew.

        Args:
            owners: The user's parameters.
        """
        if not self._are_known(owners):
            return False
        # Somebody may have given an object another class. During a run of another
        # thread it may be a proxy.
        kinds, others = list(map(type, self._held)), list(map(type, self._held_here))
        if kinds != others and list(map(plain_class, kinds)) != list(
            map(plain_class, others)
        ):
            return False
        written: list[int] = []
        unsure: set[int] = set()
        if self._leaves:
            written, _, _, unsure = self.tensors.take_changes()
        edits = [*self._known_modules.edits(), *self._known_tensors.edits()]
        unbrought = self._unbrought.union(
            *(one.originals.differing() for one in self._late.brought)
        )
        changed = sorted(unbrought.union(self._known.differing()))
        leaves = list(self._leaves.values())
        for index in written:
            _, original, local = leaves[index]
            # A tensor of another shape, or with a history, is not written: a step may
            # have other references to it.
            can_take = all(
                (one.shape, one.dtype) == (original.shape, original.dtype)
                for one in local
            )
            if not can_take or any(one.requires_grad for one in local):
                return False
            for one in local:
                bring_value(one, original, index in unsure)
        if (edits or changed) and not self._bring_changed(edits, changed):
            return False
        if self._late.has_brought:
            for known in self._known_insides:
                known.take()
            self._late.has_brought = False
        if edits or changed:
            self._collect()
        elif written:
            self.agree()
        self._backups = []
        for place in self._others:
            for own in place.local if type(place.original) is PerReplica else ():
                # A step seldom writes in place on a tensor with a history, so no memory
                # is spent on a copy of it.
                if isinstance(own, torch.Tensor) and not own.requires_grad:
                    self._backups.append((own, own.clone()))
        return True

    def _take_brought(self, places: dict[str, CopiedThing]) -> None:
        """Takes in the containers of an attribute that a step has read first."""
        self._containers.update(places)
        self._held += [place.original for place in places.values()]
        self._held_here += [place.local[0] for place in places.values()]
        self._known_things += places.values()

    def _bring_changed(self, edits: Sequence[Edit], changed: Sequence[str]) -> bool:
        """Brings what the user changed in modules and containers.

        False if the copies have to be made anew.
        """
        if any(edit.name in _TORCHS for edit in edits if edit.place in self._modules):
            return False
        brought = [
            edit
            for edit in edits
            if edit.name not in self._left_out.get(edit.place, frozenset())
        ]
        for edit in brought:
            refuse_trainable(f"{edit.place}.{edit.name}", edit.after, self.parameters)
        new = {
            (edit.place, f".{edit.name}"): edit.after
            for edit in brought
            if edit.after is not MISSING
        }
        new.update(
            ((path, ""), contents.named_items(self._containers[path].original))
            for path in changed
        )
        waiting = self._late.find(brought, new.values())
        if waiting is None or self.replicas[0].lacks_parts_in(new.values()):
            return False
        laters = self._late.replace(brought, waiting)
        new = {key: value for key, value in new.items() if key not in laters}
        known = [*self._leaves.values(), *self._containers.values()]
        for r, replica in enumerate(self.replicas if brought or changed else ()):
            try:
                copies = replica.copy_values(
                    new, {id(one.original): one.local[r] for one in known}
                )
            except Exception as error:
                raise uncopyable_error(", ".join(map("".join, new)), error) from error
            copies.update(laters)
            for edit in brought:
                local = self._tables[edit.place].local[r]
                edit._replace(
                    after=copies.get((edit.place, f".{edit.name}"), MISSING)
                ).apply(local)
            for path in changed:
                contents.write_items(self._containers[path].local[r], copies[path, ""])
            if brought:
                self._known_insides[r].take()
        if edits:
            self._known_modules.take()
        return True

    def put_together(
        self,
        weights: Participants,
        originals: Callable[[], Sequence[object]],
        look: Look,
        replaced: Iterable[int],
    ) -> None:
        """After a run: makes one value for each attribute that a replica wrote.

        Args:
            weights: How much the replicas of this process count.
            originals: Lists the user's modules, parameters and buffers.
            look: Compares what is kept with what other replicas wrote.
            replaced: The positions of buffers in whose place a replica has put another
                tensor.

        Raises:
            RuntimeError: If the step made a tensor to be trained.
        """
        present = weights.present
        # By path: all that a container is to hold, or the attributes of a module that a
        # step wrote; `ABSENT`: removed.
        self._merged: dict[str, Items] = {}
        edits = self._list_edits(present, replaced)
        changed = self._find_changed_containers(present)
        if changed or edits:
            users = functools.cache(
                functools.partial(self.known_in_replicas, originals)
            )
            memory = functools.cache(
                functools.partial(self._list_memory, [edit.after for edit in edits])
            )
            merger = ModuleMerger(
                present,
                len(self.replicas),
                users,
                memory,
                self.device,
                look,
                weights.is_understudy,
            )
            for path, (_, original, local) in self._containers.items():
                if path in changed:
                    merger.is_quiet = self._is_quiet(path)
                    items = [contents.named_items(local[r]) for r in present]
                    self._merged[path] = merger.items(
                        f"attribute {path}", items, contents.named_items(original)
                    )
            self._merge_attributes(present, edits, merger)
        self._written = self._find_written(present, look)

    def _list_edits(
        self, present: Sequence[int], replaced: Iterable[int]
    ) -> list[Edit]:
        """What steps have assigned to attributes of modules and tensors."""
        edits: list[Edit] = []
        for of_replica in edits_of([self._known_insides[r] for r in present]):
            edits += [edit for edit in of_replica if edit.name not in TABLES]
        for r in present:
            edits += self._known_tensors_local[r].edits()
        edits += self._edits_of_new_buffers(present, replaced)
        return [edit for edit in edits if not self._late.is_brought(edit)]

    def _find_changed_containers(self, present: Sequence[int]) -> set[str]:
        """The paths of containers and objects that hold something else in a replica."""
        changed: set[str] = set()
        for r in present if self._containers else ():
            changed.update(self._known_local[r].differing())
            for late in self._late.brought:
                if late.containers:
                    changed.update(late.local[r].differing())
        return changed

    def _find_written(
        self, present: Sequence[int], look: Look
    ) -> dict[str, torch.Tensor]:
        """By path: what tensors become on which a step wrote in place.

        They become what the first replica has.
        """
        found: dict[str, torch.Tensor] = {}
        if not self._leaves:
            return found
        written = set().union(*(self._writes[r].written() for r in present))
        for index, (path, original, local) in enumerate(
            self._leaves.values() if written else ()
        ):
            first, *others = (local[r] for r in present)
            if index in written and first.shape == original.shape:
                look(f"attribute {path}", first, others)
                found[path] = first
        return found

    def known_in_replicas(
        self, originals: Callable[[], Sequence[object]]
    ) -> dict[int, Any]:
        """By the ids of what the replicas have copies of: the user's objects."""
        users = {id(original): original for original in originals()}
        known: dict[int, Any] = {}
        for replica in self.replicas:
            for key, own in replica.local_objects.items():
                if key in users:
                    known[id(own)] = users[key]
        for thing in self._known_things:
            known.update(
                (id(local), thing.original)
                for local in thing.local
                if not isinstance(local, PLAIN)
            )
        return known

    def _edits_of_new_buffers(
        self, present: Sequence[int], replaced: Iterable[int]
    ) -> list[Edit]:
        """What a step has set on the tensors that it put in the place of buffers.

        The user's get it, too.
        """
        self._of_new_buffers: dict[int, dict[str, Any]] = {}
        edits = []
        for index in replaced:
            path = f"{self.buffer_names[index]} (made in the step)"
            made: dict[str, Any] = {}
            local = [vars(replica.buffer(index)) for replica in self.replicas]
            if any(local[r] for r in present):
                self._of_new_buffers[index] = made
                self._tables[path] = CopiedThing(path, made, local)
                edits += [
                    Edit(path, name, MISSING, value)
                    for r in present
                    for name, value in local[r].items()
                ]
        return edits

    def _merge_attributes(
        self, present: Sequence[int], edits: Iterable[Edit], merger: ModuleMerger
    ) -> None:
        for path, name in dict.fromkeys((edit.place, edit.name) for edit in edits):
            _, original, local = self._tables[path]
            if path in self._modules:
                # Other replicas have not read what one of them has replaced.
                self._late.bring(path, name)
            merged = self._merged.setdefault(path, {})
            before = original.get(name, ABSENT)
            values = [local[r].get(name, ABSENT) for r in present]
            if name in self._computed.get(path, ()):
                # Each replica has computed it of the same parameters.
                first = values[0]
                after = (
                    first.detach().to(self.device)
                    if isinstance(first, torch.Tensor)
                    else before
                )
            elif name in self._states.get(path, ()):
                continue  # the metric itself reduces it
            else:
                merger.is_quiet = self._is_quiet(path)
                after = merger.merge(f"attribute {path}.{name}", values, before)
            merged[ATTRIBUTE, name] = after

    def _is_quiet(self, path: str) -> bool:
        return path in self._of_packages or _is_of_package(self._place(path).original)

    def _place(self, path: str) -> CopiedThing:
        return self._tables[path] if path in self._tables else self._containers[path]

    def write_back(self) -> None:
        """Writes what was put together on the user's modules.

        The next run brings it to all replicas.
        """
        for path, items in self._merged.items():
            if path in self._containers:
                items = {
                    name: value for name, value in items.items() if value is not ABSENT
                }
                contents.write_items(self._containers[path].original, items)
                self._unbrought.add(path)
                continue
            _, inside, local = self._tables[path]
            for (_, name), value in items.items():
                Edit(path, name, None, MISSING if value is ABSENT else value).apply(
                    inside
                )
                self._forget(path, name)
                if type(value) is PerReplica:
                    # Only the user's module holds it now. When the user drops it, its
                    # memory is free.
                    for of_replica in local:
                        of_replica.pop(name, None)
        if self._merged.keys() & self._tables.keys():
            for known in self._known_insides:
                known.take()
            for of_tensors in self._known_tensors_local:
                of_tensors.take()
        # The replicas get these values before the next run: a backward through the
        # results of this run may still need the tensors that they have now.
        for index, path in enumerate(self._leaves if self._written else ()):
            if path in self._written:
                self.tensors.take(index, self._written[path])
        self._merged, self._backups = {}, []

    def _forget(self, path: str, name: str) -> None:
        if path in self._modules:
            self._known_modules.forget(path, name)
        else:
            self._known_tensors.forget(path, name)

    def _list_memory(self, written: Sequence[object]) -> set[int]:
        """The memory of all that the replicas have copies of.

        It includes that of outputs among what a step has written.
        """
        tensors: list[torch.Tensor] = []
        for leaf in self._leaves.values():
            tensors += leaf.local
        for replica in self.replicas:
            tensors += replica.tensors()
        for _, held in contents.things_in("", written):
            if isinstance(held, torch.Tensor) and held.requires_grad:
                tensors.append(held)
        return set(map(memory_id, tensors))

    def restore(self) -> None:
        """After a run that failed: takes back what it wrote on some tensors.

        They are in the `PerReplica`s of the user's modules.
        """
        for tensor, before in self._backups:
            write_value(tensor, before)

    def agree(self) -> None:
        """Says that the tensors agree with the user's.

        What is written on them from here on, the step writes.
        """
        for writes in self._writes:
            writes.note()


# Torch's own attributes, but for the one that a user and a step may write.
_TORCHS = TORCHS_OWN - {"training"}


def _is_of_package(thing: object) -> bool:
    """Whether a thing is of a class of torch or torchmetrics.

    The attributes of such a class are no affair of the user's.
    """
    return type(thing).__module__.partition(".")[0] in ("torch", "torchmetrics")
