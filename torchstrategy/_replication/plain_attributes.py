"""The plain attributes of the user's modules, with what they hold, in the user's modules and in the replicas' copies.

A plain attribute may hold a configuration, a list of numbers or an object that counts. Replicas have copies of these.
What the user changes in them between runs reaches the copies before the next run. What steps write on the copies
becomes one value for the user's modules after the run: see `merged_values`. The
copies get it before the next run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Any, TypeVar, final

import torch
from torch import nn

from torchstrategy._binding.attribute_contents import (
    PLAIN,
    Attribute,
    Leaf,
    Place,
    contents_of,
    named_items,
    places_and_leaves,
    things_in,
    write,
    write_items,
)
from torchstrategy._binding.changes import (
    MISSING,
    Edit,
    Snapshot,
    StepWrites,
    TrackedTensor,
    TrackedTensors,
    write_value,
)
from torchstrategy._binding.module_traversal import TORCHS_OWN, computed_by_hooks
from torchstrategy._binding.object_attributes import Told
from torchstrategy._binding.proxies import plain_class
from torchstrategy._core.distributed_values import ABSENT, PerReplica
from torchstrategy._core.types import Device
from torchstrategy._replication.copyable import refuse_trainable
from torchstrategy._replication.merged_values import Items, Look, Merger, told_of
from torchstrategy._replication.metrics import states_of
from torchstrategy._replication.module_replica import ModuleReplica, uncopyable
from torchstrategy._replication.tensor_copies import storage_of

T = TypeVar("T", Place, Leaf)


@final
class PlainAttributes:
    """The plain attributes of the user's modules, with the containers and tensors that they hold.

    Args:
        modules: The user's modules.
        paths: What to call each of them.
        replicas: The copies of the modules in each replica.
        parameters: The ids of the user's parameters.
        known: The ids of parameters and buffers, which other code keeps in step, and which may change.
        device: Where the user's parameters are.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        paths: Sequence[str],
        replicas: Sequence[ModuleReplica],
        parameters: Set[int],
        known: Set[int],
        device: Device,
    ) -> None:
        self._insides = [module.__dict__ for module in modules]
        self._paths = paths
        self._replicas = replicas
        self._parameters = parameters
        self._known_tensors = known
        self._device = device
        # The attributes that are states of metrics, which `metrics` brings to the replicas and back.
        self._states = [set(states_of(inside)) for inside in self._insides]
        # The attributes that hooks compute, in each replica for itself.
        self._computed = [computed_by_hooks(module) for module in modules]
        self._is_quiet = list(map(_is_of_package, modules))
        self._tables = Snapshot(dict(enumerate(self._insides)))
        # The ids of the user's tensors and containers with which the copies of the replicas do not agree.
        self._unbrought: set[int] = set()
        self._backups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._collect()

    def _collect(self) -> None:
        """Lists all containers and tensors that the attributes hold. The copies have to agree with the user's now."""
        places, leaves, self._others = places_and_leaves(self._named())
        # The ids of the parameters and buffers that attributes hold.
        self.known_held = leaves.keys() & self._known_tensors
        self._places = _named_apart(places.values())
        self._leaves = _named_apart(leaf for key, leaf in leaves.items() if key not in self.known_held)
        self._known_things: list[Place | Leaf] = [*self._places, *leaves.values(), *self._others]
        # The user's tensors that attributes hold, other than parameters and buffers.
        self.tensors = TrackedTensors([TrackedTensor(leaf.path, leaf.original) for leaf in self._leaves])
        self.tensors.watch(range(len(self._leaves)))
        self.agree()

    def bring(self) -> bool:
        """Before a run: brings what the user changed to the copies. False if the copies have to be made anew."""
        if (self._places or self._leaves) and not self._bring_contents():
            return False
        edits = list(self._tables.edits())
        if edits:
            if not self._bring_tables(edits):
                return False
            self._collect()
        kept = (own for place in self._others if type(place.original) is PerReplica for own in place.local)
        # A step seldom writes in place on a tensor with a history, so no memory is spent on a copy of it.
        constant = (own for own in kept if isinstance(own, torch.Tensor) and not own.requires_grad)
        self._backups = [(own, own.clone()) for own in constant]
        return True

    def put_together(
        self,
        present: Sequence[int],
        originals: Callable[[], Sequence[object]],
        look: Look,
        is_understudy: bool = False,
    ) -> None:
        """After a run: makes one value of those of the replicas for each attribute that one of them wrote.

        Args:
            present: The replicas that took part.
            originals: Lists the user's modules, parameters and buffers.
            look: Compares what is kept with what other replicas wrote.
            is_understudy: Whether what this process computes does not count.

        Raises:
            RuntimeError: If the step made a tensor to be trained.
        """
        self._is_understudy = is_understudy
        self._merged_places: dict[str, tuple[Any, Items]] = {}
        self._merged_attributes: dict[tuple[int, str], Edit] = {}
        changed = sorted({i for r in present for i in self._known_local[r].differing()}) if self._places else []
        edits = [edit for r in present for edit in self._replicas[r].take_attributes()]
        if changed or edits:
            known = functools.partial(self.known_in_replicas, originals)
            memory = functools.partial(self._memory, [edit.after for edit in edits])
            merger = Merger(present, len(self._replicas), known, memory, self._device, look, is_understudy)
            self._merge_places(present, changed, merger)
            self._merge_attributes(present, edits, merger)
        self._put_tensors_together(present, look)

    def known_in_replicas(self, originals: Callable[[], Sequence[object]]) -> dict[int, Any]:
        """By the ids of what the replicas have copies of: the user's objects in their place."""
        users = {id(original): original for original in originals()}
        known = {id(own): users[key] for r in self._replicas for key, own in r.counterparts() if key in users}
        for thing in self._known_things:
            known.update((id(local), thing.original) for local in thing.local if not isinstance(local, PLAIN))
        return known

    def _merge_places(self, present: Sequence[int], changed: Iterable[int], merger: Merger) -> None:
        for place in map(self._places.__getitem__, changed):
            items = [named_items(place.local[r]) for r in present]
            merger.is_quiet = _is_of_package(place.original)
            merged = merger.items(f"attribute {place.path}", items, named_items(place.original))
            self._merged_places[place.path] = place.original, merged

    def _merge_attributes(self, present: Sequence[int], edits: Iterable[Edit], merger: Merger) -> None:
        for position, name in dict.fromkeys((edit.place, edit.name) for edit in edits):
            if name in self._states[position]:
                continue
            before = self._insides[position].get(name, ABSENT)
            value, *others = (self._replicas[r].insides[position].get(name, ABSENT) for r in present)
            if name in self._computed[position]:
                value = value.detach().to(self._device) if isinstance(value, torch.Tensor) else before
            else:
                merger.is_quiet = self._is_quiet[position]
                value = merger.merged(f"attribute {self._paths[position]}.{name}", [value, *others], before)
            after = MISSING if value is ABSENT else value
            self._merged_attributes[position, name] = Edit(position, name, before, after)

    def told(self) -> dict[Any, Told]:
        """What other workers may have to know: numbers, texts, tensors and plain containers of them, by their places.

        A key is the path of a container, with how it shows an item and the item's key. Of an attribute of a module it
        is its position and its name, and of a tensor that the step wrote in place, its path.
        """
        known = {id(place.original) for place in self._places}
        found: list[tuple[Any, str, Any, Any]] = []
        for (position, name), edit in self._merged_attributes.items():
            path = "" if self._is_quiet[position] else f"attribute {self._paths[position]}.{name}"
            if name not in self._computed[position] and edit.after is not edit.before:
                found.append((("", position, name), path, edit.after, edit.before))
        for where, (original, items) in self._merged_places.items():
            before, is_quiet = named_items(original), _is_of_package(original)
            for (shown, key), value in items.items():
                path = "" if is_quiet else f"attribute {where}{shown.format(key)}"
                was = before.get((shown, key), ABSENT)
                if isinstance(key, (str, int)) and value is not was:
                    found.append(((where, shown, key), path, value, was))
        for index, value in self._written.items():
            path = self._leaves[index].path
            found.append(((path, "", ""), f"attribute {path}", value, value))
        pairs = ((key, told_of(value, before, path)) for key, path, value, before in found if id(value) not in known)
        return {key: told for key, told in pairs if told is not None}

    def put(self, key: Any, value: Any) -> None:
        """Replaces what was put together by the value of another worker; `ABSENT`: by the user's value from before."""
        where, shown, name = key
        value = value.to(self._device) if isinstance(value, torch.Tensor) else value
        if not where:
            before = self._insides[shown].get(name, MISSING)
            self._merged_attributes[shown, name] = Edit(shown, name, before, before if value is ABSENT else value)
            return
        for index, leaf in enumerate(self._leaves if not shown else ()):
            if leaf.path == where:
                self._written[index] = leaf.original.clone() if value is ABSENT else value
        for place in self._places if shown else ():
            if place.path == where:
                before = named_items(place.original)
                _, items = self._merged_places.setdefault(where, (place.original, before))
                items[shown, name] = before.get((shown, name), ABSENT) if value is ABSENT else value
                if items[shown, name] is ABSENT:
                    del items[shown, name]

    def keep(self, key: Any) -> None:
        """Makes a value, which in other workers is another one, that of the replicas of this worker."""
        where, shown, name = key
        count = len(self._replicas)
        if where:
            value = self._merged_places[where][1].get((shown, name), ABSENT) if where in self._merged_places else ABSENT
        else:
            value = self._merged_attributes[shown, name].after if (shown, name) in self._merged_attributes else ABSENT
        if not isinstance(value, torch.Tensor):
            return
        components, understudy = ([ABSENT] * count, value) if self._is_understudy else ([value] * count, None)
        self.put(key, PerReplica(components, understudy=understudy, is_kept=True))

    def write_back(self) -> None:
        """Writes what was put together on the user's modules. The next run brings it to all replicas."""
        for original, items in self._merged_places.values():
            write_items(original, items)
            self._unbrought.add(id(original))
        for edit in self._merged_attributes.values():
            edit.apply(self._insides[edit.place])
            self._tables.forget(edit.place, edit.name)
            if type(edit.after) is PerReplica:
                # Only the user's module holds it now. When the user drops it, its memory is free.
                for replica in self._replicas:
                    replica.insides[edit.place].pop(edit.name, None)
        if self._merged_attributes:
            for replica in self._replicas:
                replica.note_attributes()
        self._merged_attributes, self._merged_places, self._backups = {}, {}, []
        # The replicas get these values before the next run: a backward through the results of this run may still need
        # the tensors that they have now.
        for index, value in self._written.items():
            leaf = self._leaves[index]
            write_value(leaf.original, value, False)
            self._unbrought.add(id(leaf.original))

    def _named(self) -> Iterator[Attribute]:
        """The plain attributes of all modules: the path, the user's value, and the value in each replica."""
        # Attributes that the user has replaced and that are not brought yet are left out: the replicas still hold the
        # old value.
        unbrought = {(edit.place, edit.name) for edit in self._tables.edits()}
        for position, inside in enumerate(self._insides):
            left_out = TORCHS_OWN | self._computed[position] | self._states[position]
            for name in [name for name in inside if name not in left_out and (position, name) not in unbrought]:
                local = [replica.insides[position].get(name, MISSING) for replica in self._replicas]
                is_everywhere = not any(value is MISSING for value in local)
                if is_everywhere and type(inside[name]) not in PLAIN and id(inside[name]) not in self._parameters:
                    yield f"{self._paths[position]}.{name}", inside[name], local

    def _bring_tables(self, edits: Sequence[Edit]) -> bool:
        if any(edit.name in TORCHS_OWN and edit.name != "training" for edit in edits):
            return False
        brought = [e for e in edits if e.name not in self._computed[e.place] | self._states[e.place]]
        paths = [f"{self._paths[edit.place]}.{edit.name}" for edit in brought]
        for path, edit in zip(paths, brought, strict=True):
            refuse_trainable(path, edit.after, self._parameters)
        if self._replicas[0].lacks_parts_in(edit.after for edit in brought):
            return False
        try:
            for r, replica in enumerate(self._replicas):
                replica.bring_attributes(brought, self._counterparts(r))
        except Exception as error:
            raise uncopyable(", ".join(paths), error) from error
        self._tables.take()
        for replica in self._replicas:
            replica.note_attributes()
        return True

    def _counterparts(self, r: int) -> dict[int, Any]:
        """By the ids of the user's containers and tensors: what one replica has in their place."""
        tensors = {id(leaf.original): leaf.local[r] for leaf in self._leaves}
        return {**tensors, **{id(place.original): place.local[r] for place in self._places}}

    def _bring_contents(self) -> bool:
        """Brings what the user changed in containers and tensors. False if the copies have to be made anew."""
        # Somebody may have given an object another class. During a run of another thread it may be a proxy.
        pairs = [(type(place.original), type(place.local[0])) for place in self._places]
        if any(one is not other and plain_class(one) is not plain_class(other) for one, other in pairs):
            return False
        unbrought = {i for i, leaf in enumerate(self._leaves) if id(leaf.original) in self._unbrought}
        written = unbrought.union(self.tensors.take_changes()[0])
        others = {i for i, place in enumerate(self._places) if id(place.original) in self._unbrought}
        changed = sorted(others.union(self._known.differing()))
        self._unbrought.clear()
        for index in written:
            original, local = self._leaves[index].original, self._leaves[index].local
            # A tensor of another shape, or with a history, is not written: a step may have other references to it.
            if any((one.shape, one.dtype) != (original.shape, original.dtype) or one.requires_grad for one in local):
                return False
            for one in local:
                write_value(one, original, False)
        new = {(index, ""): contents_of(self._places[index].original) for index in changed}
        if self._replicas[0].lacks_parts_in(new.values()):
            return False
        for r, replica in enumerate(self._replicas if changed else ()):
            for (index, _), contents in replica.copied(new, self._counterparts(r)).items():
                write(self._places[index].local[r], contents)
        if changed:
            self._collect()
        elif written:
            self.agree()
        return True

    def _put_tensors_together(self, present: Sequence[int], look: Look) -> None:
        written = {index for r in present for index in self._writes[r].written()} if self._leaves else set()
        fits = [leaf.local[present[0]].shape == leaf.original.shape for leaf in self._leaves]
        self._written = {index: self._leaves[index].local[present[0]] for index in sorted(written) if fits[index]}
        for index in self._written:
            first, *others = (self._writes[r].tensors[index] for r in present)
            look(f"attribute {self._leaves[index].path}", first, others)

    def _memory(self, written: Sequence[object]) -> set[int]:
        of_leaves = chain.from_iterable(leaf.local for leaf in self._leaves)
        found = (held for _, held in things_in("", written) if isinstance(held, torch.Tensor) and held.requires_grad)
        return set(map(storage_of, chain(of_leaves, found, *(replica.tensors() for replica in self._replicas))))

    def restore(self) -> None:
        """After a run that failed: takes back what it wrote on tensors in the `PerReplica`s of the user's modules."""
        for tensor, before in self._backups:
            write_value(tensor, before, False)

    def agree(self) -> None:
        """Says that the copies agree with the user's: what is written on them from here on, the step writes."""
        count = range(len(self._replicas))
        self._known = Snapshot({i: place.original for i, place in enumerate(self._places)})
        self._known_local = [Snapshot({i: place.local[r] for i, place in enumerate(self._places)}) for r in count]
        self._writes = [StepWrites([leaf.local[r] for leaf in self._leaves]) for r in count]


def _named_apart(things: Iterable[T]) -> list[T]:
    """The same things, no two of which have one path: two models may be of one class."""
    seen: Counter[str] = Counter()
    made = []
    for thing in things:
        seen[thing.path] += 1
        number = seen[thing.path]
        made.append(thing if number == 1 else thing._replace(path=f"{thing.path} ({number})"))
    return made


def _is_of_package(thing: object) -> bool:
    """Whether a thing is of a class of torch or torchmetrics, whose attributes are no affair of the user's."""
    return type(thing).__module__.partition(".")[0] in ("torch", "torchmetrics")
