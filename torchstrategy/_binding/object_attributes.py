"""The attributes of the user's trainers, in each replica.

A trainer is an object of the user's own class that holds models, optimizers, schedulers or scalers.

Methods of a trainer write on it: `self.fake = self.generator(noise)`, `self.steps += 1`. If all replicas wrote on the
one object, each would read what another wrote. So during a run each replica has its own attributes, which begin with
the user's values. After the run they become one set of attributes again: a value that is equal in all replicas stays as
it is, and values that differ become a `PerReplica`. In the next run, each replica finds its component of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, final

import torch

from torchstrategy._binding.attribute_contents import contents_of, write
from torchstrategy._binding.changes import MISSING, Edit, edits
from torchstrategy._binding.proxies import plain_class
from torchstrategy._core.distributed_values import ABSENT, DistributedValues, PerReplica, component
from torchstrategy._core.tree import tree_flatten


class Told(NamedTuple):
    """What a process tells the others of a value that its replicas wrote."""

    text: str  # it differs where two values do
    value: Any
    is_own: bool  # whether values that differ stay what they are in each process; else one process decides
    path: str = ""  # what to call it in a warning; empty: nobody is warned


KEPT = ""  # the text of a process whose value stays that from before the run, since it takes no part


@final
class Trainer:
    """A trainer that becomes a proxy, and its attributes in each replica of one run.

    Args:
        original: The user's trainer. All of it is in its `__dict__`.
        num_replicas: How many replicas the strategy has.
        present: The replicas that take part in the run.
        has_others: Whether other processes have replicas, too.
        is_understudy: Whether what this process computes does not count.
    """

    def __init__(
        self,
        original: Any,
        num_replicas: int,
        present: Sequence[int],
        has_others: bool = False,
        is_understudy: bool = False,
    ) -> None:
        self.original = original
        self._has_others = has_others
        self._is_understudy = is_understudy
        self._inside: dict[str, Any] = object.__getattribute__(original, "__dict__")
        self._present = present
        self._num_replicas = num_replicas
        self._known: dict[str, Any] = {}
        self._given: list[dict[str, Any]] = [{} for _ in range(num_replicas)]
        self.attributes: list[dict[str, Any]] = [{} for _ in range(num_replicas)]
        self.refresh()

    def refresh(self) -> None:
        """Copies to the replicas the attributes that were written for all of them, for example by a merge function."""
        now = dict(self._inside)
        for edit in edits(self._known, now):
            for r, tables in enumerate(zip(self._given, self.attributes, strict=True)):
                for table in tables:
                    edit._replace(after=in_replica(edit.after, r, self._num_replicas)).apply(table)
        self._known = now

    def put_together(self) -> None:
        """Makes one set of attributes of those that the replicas wrote, for `write_back`."""
        written = (edits(self._given[r], self.attributes[r]) for r in self._present)
        self._edits = {name: self._of_all(name) for name in dict.fromkeys(e.name for e in chain.from_iterable(written))}

    def told(self) -> dict[Any, Told]:
        """What is one value in this process, for the others to compare."""
        pairs = ((name, edit.after) for name, edit in self._edits.items())
        told = {("", "", name): Told(repr(value), value, True) for name, value in pairs if isinstance(value, _PLAIN)}
        if self._is_understudy:
            kept = [name for name, edit in self._edits.items() if isinstance(edit.before, PerReplica)]
            told.update({("", "", name): Told(KEPT, None, True) for name in kept})
        return told

    def keep(self, key: Any) -> None:
        """Replicas of other processes have another value."""
        before = self._known.get(key[2], MISSING)
        value = self._edits[key[2]].after if key[2] in self._edits else before
        if not isinstance(value, PerReplica) and value is not MISSING:
            values = [value if c else ABSENT for c in self._counts(before)]
            self._edits[key[2]] = Edit(None, key[2], before, self._own(before, values))

    def put(self, key: Any, value: Any) -> None:
        """All replicas whose rows count have this value."""
        before = self._known.get(key[2], MISSING)
        self._edits[key[2]] = Edit(None, key[2], before, before if value is ABSENT else value)

    def write_back(self) -> bool:
        """Writes the attributes on the user's trainer. Returns whether somebody may call backward on one of them."""
        for edit in self._edits.values():
            edit.apply(self._inside)
        values = [list(edit.after.values) for edit in self._edits.values() if isinstance(edit.after, DistributedValues)]
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_flatten(values)[0])

    def _of_all(self, name: str) -> Edit:
        before = self._known.get(name, MISSING)
        values = [own.get(name, MISSING) for own in self.attributes]
        counted = [v if c else ABSENT for v, c in zip(values, self._counts(before), strict=True)]
        if self._is_understudy and isinstance(before, PerReplica):
            return Edit(None, name, before, before)
        if self._is_understudy and isinstance(values[0], _PLAIN):
            return Edit(None, name, before, values[0])  # until the others tell theirs
        if self._has_others and isinstance(values[0], torch.Tensor):
            return Edit(None, name, before, self._own(before, counted))
        return Edit(None, name, before, _as_one(counted))

    def _counts(self, before: Any) -> list[bool]:
        # A replica that takes no part in the step keeps its value, if it had a value of its own.
        return [isinstance(before, PerReplica) or r in self._present for r in range(self._num_replicas)]

    def _own(self, before: Any, values: Sequence[Any]) -> Any:
        """The value where replicas of other processes have others."""
        if not self._is_understudy:
            return PerReplica([ABSENT if value is MISSING else value for value in values])
        return before if isinstance(before, PerReplica) else PerReplica([ABSENT] * len(values), understudy=values[0])


@final
class SharedTrainer:
    """A trainer that all replicas share, as not all of it is in its `__dict__`: a dict, or an object with slots."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name = name
        self._thing = thing
        self.refresh()

    def refresh(self) -> None:
        """Notes what the trainer holds now: what is written from here on, a step writes."""
        self._known = contents_of(self._thing)

    def check_unwritten(self) -> None:
        """Raises an error if a step wrote on the trainer.

        Raises:
            RuntimeError: Naming what was written, which is taken back.
        """
        table = 1 if isinstance(self._thing, dict) else 2  # which part of the contents has the items or attributes
        written = next(edits(self._known[table], contents_of(self._thing)[table]), None)
        if written is None:
            return
        write(self._thing, self._known)
        key = written.name
        what = f"{self._name}[{key!r}]" if isinstance(self._thing, dict) else f"{self._name}.{key}"
        kind = plain_class(type(self._thing)).__name__
        raise RuntimeError(
            f"The step wrote {what} in a replica. All replicas share this {kind}, which holds models or optimizers: "
            "one would read what another wrote. Return the value from the step; or keep it on an object of a class of "
            "your own, as in self.loss = loss, of which each replica has its own attributes."
        )


def in_replica(value: Any, replica: int, num_replicas: int) -> Any:
    """What one of some replicas has in the place of a value; `MISSING` if it has none."""
    if not isinstance(value, DistributedValues) or len(value._components) != num_replicas:
        return value  # it is a value of another strategy
    own = component(value, replica)
    if own is ABSENT:
        # This process may be an understudy again, which goes on from what it had.
        own = getattr(value, "understudy", None)
        return MISSING if own is None else own
    return own


def _as_one(values: Sequence[Any]) -> Any:
    """The value of all replicas, if theirs are equal; else a `PerReplica`. Replicas with `ABSENT` do not count."""
    there = [value for value in values if value is not ABSENT]
    if all(_are_equal(value, there[0]) for value in there):
        return there[0]
    return PerReplica([ABSENT if value is MISSING else value for value in values])


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _are_equal(value: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal numbers, strings or the like, or tuples of such.

    Two equal tensors, or other objects, count as different: later, one of them may be changed in one replica.
    """
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    return value is other or (isinstance(value, _PLAIN) and bool(value == other))
