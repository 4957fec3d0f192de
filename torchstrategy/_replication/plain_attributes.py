"""What plain attributes hold, in the user's modules and in the replicas' copies.

A plain attribute may hold a configuration, a list of numbers or an object that counts. Replicas have copies of these.
What the user changes in them between runs reaches the copies before the next run. What a step changes in its own copies
reaches the user's modules after the run, if it is data: numbers, texts, and containers of them. Anything else that a
step keeps there stays in the replica.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, final

from torchstrategy._binding.attribute_contents import Attribute, contents_of, is_data, places_and_leaves, write
from torchstrategy._binding.changes import Snapshot, TrackedTensor, TrackedTensors, write_value, writes_on
from torchstrategy._binding.proxies import plain_class
from torchstrategy._core.torch_internals import versions
from torchstrategy._replication.module_replica import ModuleReplica

NamedAttributes = Callable[[], Iterator[Attribute]]
"""Lists attributes of the user's modules."""


@final
class Attributes:
    """The containers and tensors that the plain attributes of some modules hold.

    Args:
        replicas: The copies of the modules in each replica.
        known: The ids of parameters and buffers, which other code keeps in step, and which may change.
        named: Lists the attributes of the user's modules.
    """

    def __init__(self, replicas: Sequence[ModuleReplica], known: Set[int], named: NamedAttributes) -> None:
        self._replicas = replicas
        self._known_tensors = known
        # The ids of the user's tensors and containers with which the copies of the replicas do not agree.
        self._unbrought: set[int] = set()
        self.collect(named)

    def collect(self, named: NamedAttributes) -> None:
        """Lists all containers and tensors that the attributes hold. The copies have to agree with the user's now."""
        places, leaves = places_and_leaves(named())
        # The ids of the parameters and buffers that attributes hold.
        self.known_held = leaves.keys() & self._known_tensors
        self._places = list(places.values())
        self._leaves = [leaf for key, leaf in leaves.items() if key not in self.known_held]
        # The user's tensors that attributes hold, other than parameters and buffers.
        self.tensors = TrackedTensors([TrackedTensor(leaf.path, leaf.original) for leaf in self._leaves])
        self.tensors.watch(range(len(self._leaves)))
        self.is_empty = not (self._places or self._leaves)
        self.agree()

    def counterparts(self, r: int) -> dict[int, Any]:
        """By the ids of the user's containers and tensors: what one replica has in their place."""
        tensors = {id(leaf.original): leaf.local[r] for leaf in self._leaves}
        return {**tensors, **{id(place.original): place.local[r] for place in self._places}}

    def bring(self, named: NamedAttributes) -> bool:
        """Before a run: brings what the user changed to the copies. False if the copies have to be made anew."""
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
            # A tensor of another shape cannot be written on the copy, to which a step may have other references.
            if any(one.shape != original.shape or one.dtype != original.dtype for one in local):
                return False
            for one in local:
                write_value(one, original, False)
        new = {(index, ""): contents_of(self._places[index].original) for index in changed}
        if self._replicas[0].lacks_parts_in(new.values()):
            return False
        for r, replica in enumerate(self._replicas if changed else ()):
            for (index, _), contents in replica.copied(new, self.counterparts(r)).items():
                write(self._places[index].local[r], contents)
        if changed:
            self.collect(named)
        elif written:
            self.agree()
        return True

    def give_back(self, present: Sequence[int], named: NamedAttributes) -> None:
        """After a run: brings what the first replica changed to the user's modules, and to the other replicas."""
        lead = present[0]
        changed = self._known_local[lead].differing()
        if self._leaves:
            self._give_back_tensors(present)
        for r in present[1:]:
            self._forget(r)
        if not changed:
            return
        own = {id(place.local[lead]): place for place in self._places}
        # What deepcopy left the same object in both, such as a lock, stays the same object.
        own_held = set(map(id, self._known_local[lead].held))
        shared = {id(item): item for item in self._known.held if id(item) in own_held}
        pairs = [(self._places[index], contents_of(self._places[index].local[lead])) for index in changed]
        known = own.keys() | shared.keys()
        brought = [pair for pair in pairs if is_data(pair[1], lambda value: id(value) in known)]
        if not brought:
            return
        for i in range(len(self._replicas) + 1):
            if i != lead:
                memo = {**shared, **{key: place.everywhere()[i] for key, place in own.items()}}
                for place, contents in brought:
                    write(place.everywhere()[i], copy.deepcopy(contents, dict(memo)))
        self._unbrought.difference_update(id(place.original) for place, _ in brought)
        self.collect(named)

    def _forget(self, r: int) -> None:
        """Sees to it that the data which another replica than the first put into containers does not stay there."""
        differing = self._known_local[r].differing()
        if not differing:
            return
        own = {*(id(place.local[r]) for place in self._places), *map(id, self._known_local[r].held)}
        for place in map(self._places.__getitem__, differing):
            if is_data(contents_of(place.local[r]), lambda value: id(value) in own):
                self._unbrought.add(id(place.original))

    def _give_back_tensors(self, present: Sequence[int]) -> None:
        for r in present:
            local = [leaf.local[r] for leaf in self._leaves]
            pairs = enumerate(zip(self._versions[r], versions(local), strict=True))
            counted = {index for index, (before, now) in pairs if before != now}
            for index in counted | self._writes[r].take(counted):
                own, original = local[index], self._leaves[index].original
                if own.shape == original.shape and not own.requires_grad:
                    if r == present[0]:
                        write_value(original, own, False)
                    # The other replicas get the value before the next run: a backward through the results of this run
                    # may still need the tensors that they have now.
                    self._unbrought.add(id(original))

    def agree(self) -> None:
        """Says that the copies agree with the user's: what is written on them from here on, the step writes."""
        count = range(len(self._replicas))
        self._known = Snapshot({i: place.original for i, place in enumerate(self._places)})
        self._known_local = [Snapshot({i: place.local[r] for i, place in enumerate(self._places)}) for r in count]
        self._versions = [versions([leaf.local[r] for leaf in self._leaves]) for r in count]
        self._writes = [writes_on([leaf.local[r] for leaf in self._leaves]) for r in count]
