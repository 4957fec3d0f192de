"""The attributes of the user's trainers, in each replica.

A trainer is an object of the user's own class that holds models, optimizers, schedulers
or scalers.

Methods of a trainer write on it: `self.fake = self.generator(noise)`, `self.steps +=
1`. If all replicas wrote on the one object, each would read what another wrote. So
during a run each replica has its own attributes, which begin with the user's values.
After the run they become one set of attributes again: a value that is equal in all
replicas stays as it is, and values that differ become a `PerReplica`. In the next run,
each replica finds its component of that. For the attributes of modules there is another
rule: see Note [Two rules of merging attributes].
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import torch

from torchstrategy._base.distributed_values import ABSENT, DistributedValues, PerReplica
from torchstrategy._base.marks import digest_of, version_of
from torchstrategy._base.objects.attribute_contents import (
    ATTRIBUTE,
    ITEM,
    named_items,
    write_items,
)
from torchstrategy._base.objects.changes import MISSING, Edit, edits
from torchstrategy._base.objects.proxies import plain_class
from torchstrategy._base.plain import are_equal
from torchstrategy._base.tree import tree_flatten
from torchstrategy._copies.references.hook_references import MANY


class Translation:
    """What stands in a replica for a value of the user's objects, and the reverse.

    Args:
        num_replicas: How many replicas the strategy has.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    def to_replica(self, value: Any, replica: int) -> Any:
        """What a replica has in the place of a value; `MISSING` if it has none."""
        return to_replica(value, replica, self.num_replicas)

    def to_users(self, value: Any) -> Any:
        """What the user has in the place of a value of a replica."""
        return value

    def is_written(self, value: Any, present: Sequence[int]) -> bool:
        """Whether a step wrote in place on what replicas have in the place of a value.

        The value is a tensor or array.
        """
        return False

    def unite(self, value: PerReplica[Any]) -> PerReplica[Any]:
        """A per-replica value, or one of the same components that was made before."""
        return value

    def merge_array(self, value: Any, of_replicas: Sequence[Any]) -> Any:
        """What the user has for a tensor or array on which replicas wrote in place.

        It is `MISSING` if they differ.
        """
        return MISSING


class RunReplicas(NamedTuple):
    """The replicas of one run, as far as attributes depend on them."""

    num_replicas: int  # how many the strategy has
    present: Sequence[int]  # those that take part
    has_others: bool  # whether other processes have replicas, too
    # Whether what this process computes does not count; then the first replica is
    # present.
    is_understudy: bool


@dataclass(eq=False)
class Trainer:
    """A trainer that becomes a proxy, and its attributes in each replica of one run.

    Args:
        original: The user's trainer. All of it is in its `__dict__`.
        run: The replicas of the run.
        translation: What stands in the replicas for the values of attributes. None: the
            same values.
    """

    original: Any
    run: RunReplicas
    translation: Translation | None = None

    def __post_init__(self) -> None:
        self._translation = self.translation or Translation(self.run.num_replicas)
        self._known: dict[Any, Any] = {}
        self._merged: dict[Any, Any] = {}
        self._begin()
        self.refresh()

    def _begin(self) -> None:
        self._inside: dict[str, Any] = object.__getattribute__(
            self.original, "__dict__"
        )
        self.attributes: list[dict[Any, Any]] = [
            {} for _ in range(self.run.num_replicas)
        ]

    def _now(self) -> dict[Any, Any]:
        """What the user's object holds now."""
        return dict(self._inside)

    def _read_replica(self, replica: int) -> dict[Any, Any]:
        """What the object holds in a replica."""
        return self.attributes[replica]

    def _change(self, replica: int, changes: Sequence[Edit]) -> None:
        """Makes changes to what the object holds in a replica."""
        for edit in changes:
            edit.apply(self.attributes[replica])

    def refresh(self) -> None:
        """Copies to the replicas the attributes that were written for all of them.

        A merge function writes such attributes, for example.
        """
        now = self._now()
        found = list(edits(self._known, now))
        if found:
            for r in range(self.run.num_replicas):
                translated = [
                    edit._replace(after=self._translation.to_replica(edit.after, r))
                    for edit in found
                ]
                self._change(r, translated)
        self._known = now

    def put_together(self) -> None:
        """Makes one set of attributes of what the replicas wrote, for `write_back`."""
        self._merged = {}
        of_replicas = [self._read_replica(r) for r in range(self.run.num_replicas)]
        translation = self._translation
        for name in dict.fromkeys(chain(self._known, *of_replicas)):
            before = self._known.get(name, MISSING)
            now = [own.get(name, MISSING) for own in of_replicas]
            is_replaced = any(
                now[r] is not translation.to_replica(before, r)
                for r in self.run.present
            )
            if is_replaced or translation.is_written(before, self.run.present):
                self._merged[name] = self._merge_value(name, now)

    def _merge_value(self, name: Any, of_replicas: Sequence[Any]) -> Any:
        """The value for the user's trainer; `MISSING` if it is to have none.

        See Note [Two rules of merging attributes].
        """
        before = self._known.get(name, MISSING)
        if self.run.is_understudy and isinstance(before, PerReplica):
            return self._keep_of_understudy(before)
        # A replica that takes no part in the step keeps its value, if it had a value of
        # its own.
        present = (
            range(self.run.num_replicas)
            if isinstance(before, PerReplica)
            else self.run.present
        )
        values = [
            value if r in present else ABSENT for r, value in enumerate(of_replicas)
        ]
        first, *others = self._all_to_users(
            value for value in values if value is not ABSENT
        )
        # What another process has is another tensor.
        may_differ = self.run.has_others and isinstance(first, torch.Tensor)
        if not self.run.has_others and self._translation.is_written(
            before, self.run.present
        ):
            array = self._translation.merge_array(before, values)
            if array is not MISSING:
                return array
            may_differ = True
        if not may_differ and all(are_equal(value, first) for value in others):
            return first
        if self.run.is_understudy:
            is_kept = self.translation is not None
            return PerReplica([ABSENT] * len(values), understudy=first, is_kept=is_kept)
        return self._make_per_replica(values, of_replicas)

    def _make_per_replica(
        self, values: Sequence[Any], of_replicas: Sequence[Any]
    ) -> PerReplica[Any]:
        """One value of those that differ.

        Who takes no part in the run goes on with what it had.
        """
        earlier: dict[int, Any] = {}
        for r, value in enumerate(of_replicas):
            if r not in self.run.present and value is not MISSING:
                earlier[r] = value
        components = [ABSENT if value is MISSING else value for value in values]
        for r, value in earlier.items():
            if not _still_counts(value):
                components[r] = ABSENT
        if not any(
            isinstance(component, (torch.Tensor, np.ndarray))
            for component in components
        ):
            components = self._all_to_users(components)
        made = PerReplica(components, is_kept=self.translation is not None)
        made._earlier = earlier
        return self._translation.unite(made)

    def _keep_of_understudy(self, before: PerReplica[Any]) -> PerReplica[Any]:
        """What the user has where no replica of this process takes part.

        Each goes on with what it had.
        """
        earlier: dict[int, Any] = {}
        components: list[Any] = []
        for r in range(self.run.num_replicas):
            value = to_replica(before, r, self.run.num_replicas)
            if value is not MISSING:
                earlier[r] = value
            components.append(
                value if value is not MISSING and _still_counts(value) else ABSENT
            )
        # For the shape and dtype of what it does not have.
        shown = next(iter(earlier.values()), before.understudy)
        made = PerReplica(
            components, understudy=shown, is_kept=self.translation is not None
        )
        made._earlier = earlier
        return made

    def _all_to_users(self, values: Iterable[Any]) -> list[Any]:
        return [self._translation.to_users(value) for value in values]

    def write_back(self) -> bool:
        """Writes the attributes on the user's trainer.

        Returns whether somebody may call backward on one of them.
        """
        self._write()
        values = [
            list(value.values)
            for value in self._merged.values()
            if isinstance(value, DistributedValues)
        ]
        return any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for leaf in tree_flatten(values)[0]
        )

    def _write(self) -> None:
        for name, value in self._merged.items():
            Edit(None, name, None, value).apply(self._inside)


@final
@dataclass(eq=False)
class KeptContainer(Trainer):
    """Something in which a hook keeps things, and what each replica has for it.

    It is a container, or a variable of a function.

    Replicas reach their own by functions that are made for them, since a list is never
    a proxy.
    """

    own: Sequence[Any] = ()  # what the replicas have

    def _begin(self) -> None:
        self.attributes = list(self.own)
        self.drop()

    def _now(self) -> dict[Any, Any]:
        return named_items(self.original)

    def _read_replica(self, replica: int) -> dict[Any, Any]:
        items = named_items(self.attributes[replica])
        return {
            (how, self._translation.to_users(key)): value
            for (how, key), value in items.items()
        }

    def _change(self, replica: int, changes: Sequence[Edit]) -> None:
        items = self._read_replica(replica)
        for edit in changes:
            edit.apply(items)
        own = {
            (how, self._translation.to_replica(key, replica)): value
            for (how, key), value in items.items()
        }
        write_items(self.attributes[replica], own)

    def _write(self) -> None:
        if not self._merged:
            return
        items = self._now()
        for name, value in self._merged.items():
            Edit(None, name, None, value).apply(items)
        write_items(self.original, items)

    @property
    def was_written(self) -> bool:
        """Whether a replica wrote on it, after `put_together`."""
        return bool(self._merged)

    def drop(self) -> None:
        """Lets the replicas forget what they keep.

        So its memory is free when the user drops it.
        """
        for own in self.attributes:
            write_items(own, {})


@final
class SharedTrainer:
    """A trainer that all replicas share, as not all of it is in its `__dict__`.

    It is a dict, or an object with slots.
    """

    def __init__(self, name: str, thing: Any) -> None:
        self._name = name
        self._thing = thing
        self.refresh()

    def refresh(self) -> None:
        """Notes what the trainer holds now: what is written later, a step writes."""
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
            f"The step wrote {self._name}{shown.format(key)} in a replica. All "
            f"replicas share this {kind}, which holds models or optimizers: one would "
            "read what another wrote. Return the value from the step; or keep it on an "
            "object of a class of your own, as in self.loss = loss, of which each "
            "replica has its own attributes."
        )


@final
class SharedGlobal:
    """What a hook reaches by a global name.

    It is one for all replicas, and a step may not write on it.

    Args:
        name: The global name, with the path that leads on from there.
        thing: A container, an object, a tensor or an array.
        only: The names of the entries that are looked at. None: all.
        is_large: Whether it is one for all replicas since it has so many items.
    """

    def __init__(
        self,
        name: str,
        thing: Any,
        only: frozenset[str] | None = None,
        is_large: bool = False,
    ) -> None:
        self._name = name
        self.thing = thing
        self._only = only
        self._is_large = is_large
        self.refresh()

    def refresh(self) -> None:
        """Notes what is there now: what is written from here on, a step writes."""
        self._known = self._now()

    def _now(self) -> dict[Any, Any]:
        if isinstance(self.thing, torch.Tensor):
            # An inference tensor counts no writes, so its numbers are read.
            numbers = digest_of(self.thing) if self.thing.is_inference() else None
            return {"version": version_of(self.thing), "numbers": numbers}
        if isinstance(self.thing, np.ndarray):
            return {"numbers": self.thing.tobytes()}
        if isinstance(self.thing, (type, types.ModuleType)):
            found: dict[Any, Any] = {}
            for place in reversed(self._places()):
                found.update(
                    (name, held)
                    for name, held in vars(place).items()
                    if not name.startswith("_")
                )
            return found
        if self._only is None:
            return named_items(self.thing)
        return {name: self.thing[name] for name in self._only if name in self.thing}

    def _places(self) -> list[Any]:
        """The class or Python module, and before a class its proxies' class.

        That is the class that its objects have while they are proxies.
        """
        if not isinstance(self.thing, type):
            return [self.thing]
        classes: list[Any] = type.__subclasses__(self.thing)
        return [*(one for one in classes if plain_class(one) is self.thing), self.thing]

    def check_unwritten(self) -> None:
        """Raises an error if a step wrote on it.

        Raises:
            RuntimeError: Naming what was written, which is taken back, but for numbers
                in a tensor or array.
        """
        now = self._now()
        if isinstance(self.thing, (torch.Tensor, np.ndarray)):
            if now != self._known:
                raise RuntimeError(global_write_message(self._name))
            return
        written = next(edits(self._known, now), None)
        if written is None:
            return
        if isinstance(self.thing, (type, types.ModuleType)):
            for place in self._places():
                if written.name in vars(place):
                    delattr(place, written.name)
            if written.before is not MISSING:
                setattr(self.thing, written.name, written.before)
            raise RuntimeError(global_write_message(f"{self._name}.{written.name}"))
        if self._only is None:
            write_items(self.thing, self._known)
            shown, key = written.name
            name = self._name + shown.format(key)
            raise RuntimeError(
                _LARGE.format(name=name, many=MANY)
                if self._is_large
                else global_write_message(name)
            )
        written._replace(after=written.before).apply(self.thing)
        raise RuntimeError(global_write_message(written.name))


def global_write_message(name: str) -> str:
    """The message for what a hook keeps, or a step reads, that all replicas share."""
    return (
        f"{name} was written in a replica. A hook of the model, or the step, comes to "
        "it by a global name or in a method of a class, so that it is one for all "
        "replicas: one would read what another wrote. Keep it where each replica has "
        "its own: on an object of a class of your own, of which the hook is a method, "
        "as in self.kept = output; or in a variable of a function in which you define "
        "both the hook and the step."
    )


_LARGE = (
    "{name} was written in a replica, by a hook or by the step. What a hook reaches "
    "each replica has for itself, but not a container of more than {many} items, since "
    "each run would look at all of them. Keep fewer in it: take its items out between "
    "runs, as in history.extend(kept); kept.clear()."
)


def to_replica(value: Any, replica: int, num_replicas: int) -> Any:
    """What one of some replicas has in the place of a value, or `MISSING`."""
    if (
        not isinstance(value, DistributedValues)
        or len(value._components) != num_replicas
    ):
        return value  # it is a value of another strategy
    # Of an understudy, which goes on from what it had, that.
    own = value._in_replica(replica)
    if own is ABSENT and isinstance(value, PerReplica):
        own = value._earlier.get(replica, ABSENT)
    return MISSING if own is ABSENT else own


def _still_counts(value: Any) -> bool:
    """Whether a value of a replica that takes no part is one of the strategy's values.

    A number is still a part of a count. Anything else, such as an output, would be
    taken for rows of this batch.
    """
    return isinstance(value, (int, float, complex))
