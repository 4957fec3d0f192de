"""The plain attributes of the user's modules, with what they hold, in the user's modules and in the replicas' copies.

A plain attribute may hold a configuration, a list of numbers or an object that counts. Replicas have copies of these.
What the user changes in them between runs reaches the copies before the next run. What steps write on the copies
becomes one value for the user's modules after the run: see `merged_values`. The copies get it before the next run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import InitVar, dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import nn

from torchstrategy._binding import attribute_contents as contents
from torchstrategy._binding.attribute_contents import ATTRIBUTE, PLAIN, Place
from torchstrategy._binding.changes import MISSING, Edit, Snapshot, StepWrites, TrackedTensors, write_value
from torchstrategy._binding.module_traversal import TABLES, TORCHS_OWN, computed_by_hooks
from torchstrategy._binding.object_attributes import Told
from torchstrategy._binding.proxies import plain_class
from torchstrategy._core.distributed_values import ABSENT, PerReplica
from torchstrategy._core.types import Device
from torchstrategy._execution.replica_weights import ReplicaWeights
from torchstrategy._replication.copyable import refuse_trainable
from torchstrategy._replication.kept_by_hooks import KeptByHooks
from torchstrategy._replication.merged_values import Items, Look, Merger, told_of
from torchstrategy._replication.metrics import states_of
from torchstrategy._replication.module_replica import ModuleReplica, uncopyable
from torchstrategy._replication.tensor_copies import storage_of


@final
@dataclass(eq=False)
class PlainAttributes:
    """The plain attributes of the user's modules, with the containers and tensors that they hold.

    Args:
        replicas: The copies of the modules in each replica.
        modules: The user's modules.
        paths: What to call each of them.
        parameters: The ids of the user's parameters.
        buffers: The user's buffers, which other code keeps in step, as it does the parameters.
        device: Where the user's parameters are.
        kept: What hooks keep. It is not looked at here, also if an attribute holds it.
    """

    replicas: Sequence[ModuleReplica]
    modules: InitVar[Sequence[nn.Module]]
    paths: InitVar[Sequence[str]]
    parameters: Set[int]
    buffers: TrackedTensors
    device: Device
    kept: KeptByHooks

    def __post_init__(self, modules: Sequence[nn.Module], paths: Sequence[str]) -> None:
        insides = zip(paths, [module.__dict__ for module in modules], *(r.insides for r in self.replicas), strict=True)
        # All that may change has a path of its own, and is known by it, in the other workers too.
        self._modules = _by_path(Place(path, inside, local) for path, inside, *local in insides)
        by_path = dict(zip(self._modules, modules, strict=True))
        self._of_packages = {path for path, module in by_path.items() if _is_of_package(module)}
        # The attributes that hooks compute, in each replica for itself.
        self._computed = {path: computed_by_hooks(module) for path, module in by_path.items()}
        # The states of metrics, which `metrics` brings to the replicas and back.
        self._states = {path: states_of(place.original) for path, place in self._modules.items()}
        self._left_out = {path: _TORCHS.union(self._computed[path], self._states[path]) for path in self._modules}
        self._known_modules = Snapshot({path: place.original for path, place in self._modules.items()})
        own = [dict(zip(self._modules, replica.insides, strict=True)) for replica in self.replicas]
        self._known_insides = [Snapshot(of_replica, TABLES) for of_replica in own]
        self._backups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._collect()

    def _collect(self) -> None:
        """Lists all containers and tensors that the attributes hold. The copies have to agree with the user's now."""
        places, leaves, self._others = contents.places_and_leaves(self._named())
        for key in places.keys() & self.kept.own[0].keys():
            del places[key]
        # The ids of the parameters and buffers that attributes hold.
        self.known_held = leaves.keys() & {*self.parameters, *map(id, self.buffers.tensors)}
        self._places = _by_path(chain(self._modules.values(), places.values()))
        self._leaves = _by_path(leaf for key, leaf in leaves.items() if key not in self.known_held)
        self._known_things = [*places.values(), *leaves.values(), *self._others]
        # The user's tensors that attributes hold, other than parameters and buffers.
        self.tensors = TrackedTensors(leaf.original for leaf in self._leaves.values())
        self.tensors.watch()
        self._containers = {path: place for path, place in self._places.items() if path not in self._modules}
        self._known = Snapshot({path: place.original for path, place in self._containers.items()})
        self._unbrought: set[str] = set()  # the containers with which the copies do not agree, whatever they hold
        count = range(len(self.replicas))
        self._known_local = [Snapshot({path: one.local[r] for path, one in self._containers.items()}) for r in count]
        self._writes = [StepWrites([leaf.local[r] for leaf in self._leaves.values()]) for r in count]

    def _named(self) -> Iterator[Place]:
        """The plain attributes of all modules."""
        for path, (_, inside, of_replicas) in self._modules.items():
            left_out = self._left_out[path]
            for name in [name for name in inside if name not in left_out]:
                local = [of_replica.get(name, MISSING) for of_replica in of_replicas]
                is_everywhere = not any(value is MISSING for value in local)
                if is_everywhere and type(inside[name]) not in PLAIN and id(inside[name]) not in self.parameters:
                    yield Place(f"{path}.{name}", inside[name], local)

    def bring(self) -> bool:
        """Before a run: brings what the user changed to the copies. False if the copies have to be made anew."""
        # Somebody may have given an object another class. During a run of another thread it may be a proxy.
        pairs = [(type(place.original), type(place.local[0])) for place in self._containers.values()]
        if any(one is not other and plain_class(one) is not plain_class(other) for one, other in pairs):
            return False
        written = self.tensors.take_changes()[0] if self._leaves else []
        edits, changed = list(self._known_modules.edits()), sorted(self._unbrought.union(self._known.differing()))
        leaves = list(self._leaves.values())
        for _, original, local in map(leaves.__getitem__, written):
            # A tensor of another shape, or with a history, is not written: a step may have other references to it.
            if any((one.shape, one.dtype) != (original.shape, original.dtype) or one.requires_grad for one in local):
                return False
            for one in local:
                write_value(one, original, False)
        if not self._bring_changed(edits, changed):
            return False
        if edits or changed:
            self._collect()
        elif written:
            self.agree()
        kept = (own for place in self._others if type(place.original) is PerReplica for own in place.local)
        # A step seldom writes in place on a tensor with a history, so no memory is spent on a copy of it.
        constant = (own for own in kept if isinstance(own, torch.Tensor) and not own.requires_grad)
        self._backups = [(own, own.clone()) for own in constant]
        return True

    def _bring_changed(self, edits: Sequence[Edit], changed: Sequence[str]) -> bool:
        """Brings what the user changed in modules and containers. False if the copies have to be made anew."""
        if any(edit.name in _TORCHS for edit in edits):
            return False
        brought = [edit for edit in edits if edit.name not in self._left_out[edit.place]]
        for edit in brought:
            refuse_trainable(f"{edit.place}.{edit.name}", edit.after, self.parameters)
        new = {(edit.place, f".{edit.name}"): edit.after for edit in brought if edit.after is not MISSING}
        new.update(((path, ""), contents.named_items(self._containers[path].original)) for path in changed)
        if self.replicas[0].lacks_parts_in(new.values()):
            return False
        known = [*self._leaves.values(), *self._containers.values()]
        for r, replica in enumerate(self.replicas if brought or changed else ()):
            try:
                copies = replica.copied(new, {id(one.original): one.local[r] for one in known})
            except Exception as error:
                raise uncopyable(", ".join(map("".join, new)), error) from error
            for edit in brought:
                local = self._modules[edit.place].local[r]
                edit._replace(after=copies.get((edit.place, f".{edit.name}"), MISSING)).apply(local)
            for path in changed:
                contents.write_items(self._containers[path].local[r], copies[path, ""])
            if brought:
                self._known_insides[r].take()
        if edits:
            self._known_modules.take()
        return True

    def put_together(self, weights: ReplicaWeights, originals: Callable[[], Sequence[object]], look: Look) -> None:
        """After a run: makes one value of those of the replicas for each attribute that one of them wrote.

        Args:
            weights: How much the replicas of this process count.
            originals: Lists the user's modules, parameters and buffers.
            look: Compares what is kept with what other replicas wrote.

        Raises:
            RuntimeError: If the step made a tensor to be trained.
        """
        present, self._is_understudy = weights.present, weights.is_understudy
        # By path: all that a container is to hold, or the attributes of a module that a step wrote; `ABSENT`: removed.
        self._merged: dict[str, Items] = {}
        edits = [edit for r in present for edit in self._known_insides[r].edits() if edit.name not in TABLES]
        changed = {path for r in present for path in self._known_local[r].differing()} if self._containers else set()
        if changed or edits:
            users = functools.cache(functools.partial(self.known_in_replicas, originals))
            memory = functools.cache(functools.partial(self._memory, [edit.after for edit in edits]))
            merger = Merger(present, len(self.replicas), users, memory, self.device, look, weights.is_understudy)
            for path, (_, original, local) in self._containers.items():
                if path in changed:
                    merger.is_quiet = self._is_quiet(path)
                    items = [contents.named_items(local[r]) for r in present]
                    self._merged[path] = merger.items(f"attribute {path}", items, contents.named_items(original))
            self._merge_attributes(present, edits, merger)
        written = {index for r in present for index in self._writes[r].written()} if self._leaves else set()
        self._written: dict[str, torch.Tensor] = {}  # by path: what tensors become on which a step wrote in place
        for index, (path, original, local) in enumerate(self._leaves.values() if written else ()):
            first, *others = (local[r] for r in present)
            if index in written and first.shape == original.shape:
                look(f"attribute {path}", first, others)
                self._written[path] = first

    def known_in_replicas(self, originals: Callable[[], Sequence[object]]) -> dict[int, Any]:
        """By the ids of what the replicas have copies of: the user's objects in their place."""
        users = {id(original): original for original in originals()}
        known = {id(own): users[key] for r in self.replicas for key, own in r.local_objects.items() if key in users}
        for thing in self._known_things:
            known.update((id(local), thing.original) for local in thing.local if not isinstance(local, PLAIN))
        return known

    def _merge_attributes(self, present: Sequence[int], edits: Iterable[Edit], merger: Merger) -> None:
        for path, name in dict.fromkeys((edit.place, edit.name) for edit in edits):
            _, original, local = self._modules[path]
            merged = self._merged.setdefault(path, {})
            before, value, *others = (inside.get(name, ABSENT) for inside in (original, *(local[r] for r in present)))
            if name in self._computed[path]:
                after = value.detach().to(self.device) if isinstance(value, torch.Tensor) else before
            elif name in self._states[path]:
                continue
            else:
                merger.is_quiet = self._is_quiet(path)
                after = merger.merged(f"attribute {path}.{name}", [value, *others], before)
            merged[ATTRIBUTE, name] = after

    def _is_quiet(self, path: str) -> bool:
        return path in self._of_packages or _is_of_package(self._places[path].original)

    def _before(self, path: str) -> Items:
        """What a container of the user's holds, or the attributes of a module."""
        original = self._places[path].original
        if path in self._modules:
            return {(ATTRIBUTE, name): value for name, value in original.items()}
        return contents.named_items(original)

    def told(self) -> dict[Any, Told]:
        """What other workers may have to know: numbers, texts, tensors and plain containers of them, by their places.

        A key is the path of a container or module, with how it shows an item and the item's key. Of a tensor that the
        step wrote in place, it is the path.
        """
        known = {id(place.original) for place in self._containers.values()}
        told = {(path, "", ""): told_of(value, value, f"attribute {path}") for path, value in self._written.items()}
        for path, items in self._merged.items():
            before, is_quiet, computed = self._before(path), self._is_quiet(path), self._computed.get(path, ())
            for (shown, key), value in items.items():
                was = before.get((shown, key), ABSENT)
                is_of_all = isinstance(key, (str, int)) and key not in computed and id(value) not in known
                if is_of_all and value is not was:
                    name = "" if is_quiet else f"attribute {path}{shown.format(key)}"
                    told[path, shown, key] = told_of(value, was, name)
        return {key: one for key, one in told.items() if one is not None}

    def put(self, key: Any, value: Any) -> None:
        """Replaces what was put together by the value of another worker; `ABSENT`: by the user's value from before."""
        path, *name = key
        value = value.to(self.device) if isinstance(value, torch.Tensor) else value
        if path in self._places and name[0]:
            before = self._before(path)
            items = self._merged.setdefault(path, {} if path in self._modules else dict(before))
            items[tuple(name)] = before.get(tuple(name), ABSENT) if value is ABSENT else value
        elif path in self._leaves and not name[0]:
            self._written[path] = self._leaves[path].original if value is ABSENT else value

    def keep(self, key: Any) -> None:
        """Makes a value, which in other workers is another one, that of the replicas of this worker."""
        path, *name = key
        value = self._merged.get(path, {}).get(tuple(name))
        if isinstance(value, torch.Tensor):
            components = [ABSENT if self._is_understudy else value] * len(self.replicas)
            self.put(key, PerReplica(components, understudy=value if self._is_understudy else None, is_kept=True))

    def write_back(self) -> None:
        """Writes what was put together on the user's modules. The next run brings it to all replicas."""
        for path, items in self._merged.items():
            if path in self._containers:
                items = {name: value for name, value in items.items() if value is not ABSENT}
                contents.write_items(self._containers[path].original, items)
                self._unbrought.add(path)
                continue
            _, inside, local = self._modules[path]
            for (_, name), value in items.items():
                Edit(path, name, None, MISSING if value is ABSENT else value).apply(inside)
                self._known_modules.forget(path, name)
                if type(value) is PerReplica:
                    # Only the user's module holds it now. When the user drops it, its memory is free.
                    for of_replica in local:
                        of_replica.pop(name, None)
        if self._merged.keys() & self._modules.keys():
            for known in self._known_insides:
                known.take()
        # The replicas get these values before the next run: a backward through the results of this run may still need
        # the tensors that they have now.
        for index, path in enumerate(self._leaves if self._written else ()):
            if path in self._written:
                self.tensors.take(index, self._written[path])
        self._merged, self._backups = {}, []

    def _memory(self, written: Sequence[object]) -> set[int]:
        of_leaves = chain.from_iterable(leaf.local for leaf in self._leaves.values())
        tensors = (held for _, held in contents.things_in("", written) if isinstance(held, torch.Tensor))
        found = (tensor for tensor in tensors if tensor.requires_grad)
        return set(map(storage_of, chain(of_leaves, found, *(replica.tensors() for replica in self.replicas))))

    def restore(self) -> None:
        """After a run that failed: takes back what it wrote on tensors in the `PerReplica`s of the user's modules."""
        for tensor, before in self._backups:
            write_value(tensor, before, False)

    def agree(self) -> None:
        """Says that the tensors agree with the user's: what is written on them from here on, the step writes."""
        for writes in self._writes:
            writes.note()


_TORCHS = TORCHS_OWN - {"training"}  # torch's own attributes, but for the one that a user and a step may write


def _by_path(things: Iterable[Place]) -> dict[str, Place]:
    """The same things by their paths, no two of which are one: two models may be of one class."""
    seen: Counter[str] = Counter()
    made = {}
    for thing in things:
        seen[thing.path] += 1
        path = thing.path if seen[thing.path] == 1 else f"{thing.path} ({seen[thing.path]})"
        made[path] = thing._replace(path=path)
    return made


def _is_of_package(thing: object) -> bool:
    """Whether a thing is of a class of torch or torchmetrics, whose attributes are no affair of the user's."""
    return type(thing).__module__.partition(".")[0] in ("torch", "torchmetrics")
