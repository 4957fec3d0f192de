"""The attributes of the user's trainers, in each replica.

A trainer is an object of the user's own class that holds models, optimizers, schedulers or scalers.

Methods of a trainer write on it: `self.fake = self.generator(noise)`, `self.steps += 1`. If all replicas wrote on the
one object, each would read what another wrote. So during a run each replica has its own attributes, which begin with
the user's values. After the run they become one set of attributes again: a value that is equal in all replicas stays as
it is, and values that differ become a `PerReplica`. In the next run, each replica finds its component of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, final

import torch

from torchstrategy._binding.attribute_contents import ATTRIBUTE, ITEM, named_items, write_items
from torchstrategy._binding.changes import MISSING, Edit, edits
from torchstrategy._binding.proxies import plain_class
from torchstrategy._core.distributed_values import ABSENT, DistributedValues, PerReplica
from torchstrategy._core.tree import tree_flatten


class Told(NamedTuple):
    """What a process tells the others of a value that its replicas wrote."""

    text: str  # it differs where two values do
    value: Any
    is_own: bool  # whether values that differ stay what they are in each process; else one process decides
    path: str = ""  # what to call it in a warning; empty: nobody is warned


KEPT = ""  # the text of a process whose value stays that from before the run, since it takes no part
NOTHING = Told("\0", ABSENT, False)  # of a process that wrote no value, whose text differs from that of any value


@final
@dataclass(eq=False)
class Trainer:
    """A trainer that becomes a proxy, and its attributes in each replica of one run.

    Args:
        original: The user's trainer. All of it is in its `__dict__`.
        num_replicas: How many replicas the strategy has.
        present: The replicas that take part in the run.
        has_others: Whether other processes have replicas, too.
        is_understudy: Whether what this process computes does not count. Then the first replica is present.
    """

    original: Any
    num_replicas: int
    present: Sequence[int]
    has_others: bool = False
    is_understudy: bool = False

    def __post_init__(self) -> None:
        self._inside: dict[str, Any] = object.__getattribute__(self.original, "__dict__")
        self._known: dict[str, Any] = {}
        self.attributes: list[dict[str, Any]] = [{} for _ in range(self.num_replicas)]
        self.refresh()

    def refresh(self) -> None:
        """Copies to the replicas the attributes that were written for all of them, for example by a merge function."""
        now = dict(self._inside)
        for edit in edits(self._known, now):
            for r, table in enumerate(self.attributes):
                edit._replace(after=in_replica(edit.after, r, self.num_replicas)).apply(table)
        self._known = now

    def put_together(self) -> None:
        """Makes one set of attributes of those that the replicas wrote, for `write_back`."""
        self._merged: dict[str, Any] = {}
        for name in dict.fromkeys(chain(self._known, *self.attributes)):
            before, now = self._known.get(name, MISSING), [own.get(name, MISSING) for own in self.attributes]
            if any(now[r] is not in_replica(before, r, self.num_replicas) for r in self.present):
                self._merged[name] = self._merged_value(name, now)

    def _merged_value(self, name: str, of_replicas: Sequence[Any], is_own: bool = False) -> Any:
        """The value for the user's trainer; `MISSING` if it is to have none."""
        before = self._known.get(name, MISSING)
        if self.is_understudy and isinstance(before, PerReplica):
            return before
        # A replica that takes no part in the step keeps its value, if it had a value of its own.
        present = range(self.num_replicas) if isinstance(before, PerReplica) else self.present
        values = [value if r in present else ABSENT for r, value in enumerate(of_replicas)]
        first, *others = (value for value in values if value is not ABSENT)
        is_own |= self.has_others and isinstance(first, torch.Tensor)  # another process has another tensor
        if not is_own and all(_are_equal(value, first) for value in others):
            return first
        if self.is_understudy:
            return PerReplica([ABSENT] * len(values), understudy=first)
        return PerReplica([ABSENT if value is MISSING else value for value in values])

    def told(self) -> dict[Any, Told]:
        """What is one value in this process, for the others to compare."""
        told = {name: Told(repr(v), v, True) for name, v in self._merged.items() if isinstance(v, _PLAIN)}
        kept = [name for name in self._merged if self.is_understudy and type(self._known.get(name)) is PerReplica]
        return {**told, **dict.fromkeys(kept, Told(KEPT, None, True))}

    def keep(self, key: Any) -> None:
        """Replicas of other processes have another value."""
        value = self._merged.get(key, self._known.get(key, MISSING))
        if not isinstance(value, PerReplica) and value is not MISSING:
            self._merged[key] = self._merged_value(key, [value] * self.num_replicas, is_own=True)

    def put(self, key: Any, value: Any) -> None:
        """All replicas whose rows count have this value."""
        self._merged[key] = self._known.get(key, MISSING) if value is ABSENT else value

    def write_back(self) -> bool:
        """Writes the attributes on the user's trainer. Returns whether somebody may call backward on one of them."""
        for name, value in self._merged.items():
            Edit(None, name, None, value).apply(self._inside)
        values = [list(value.values) for value in self._merged.values() if isinstance(value, DistributedValues)]
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_flatten(values)[0])


@final
class SharedTrainer:
    """A trainer that all replicas share, as not all of it is in its `__dict__`: a dict, or an object with slots."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name = name
        self._thing = thing
        self.refresh()

    def refresh(self) -> None:
        """Notes what the trainer holds now: what is written from here on, a step writes."""
        self._known = named_items(self._thing)

    def check_unwritten(self) -> None:
        """Raises an error if a step wrote on the trainer.

        Raises:
            RuntimeError: Naming what was written, which is taken back.
        """
        looked_at = ITEM if isinstance(self._thing, dict) else ATTRIBUTE
        found = edits(self._known, named_items(self._thing))
        written = next((edit for edit in found if edit.name[0] == looked_at), None)
        if written is None:
            return
        write_items(self._thing, self._known)
        shown, key = written.name
        kind = plain_class(type(self._thing)).__name__
        raise RuntimeError(
            f"The step wrote {self._name}{shown.format(key)} in a replica. All replicas share this {kind}, which holds "
            "models or optimizers: one would read what another wrote. Return the value from the step; or keep it on an "
            "object of a class of your own, as in self.loss = loss, of which each replica has its own attributes."
        )


def in_replica(value: Any, replica: int, num_replicas: int) -> Any:
    """What one of some replicas has in the place of a value; `MISSING` if it has none."""
    if not isinstance(value, DistributedValues) or len(value._components) != num_replicas:
        return value  # it is a value of another strategy
    own = value._in_replica(replica)  # of an understudy, which goes on from what it had, that
    return MISSING if own is ABSENT else own


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
