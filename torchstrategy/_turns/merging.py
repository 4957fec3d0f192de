"""What the replicas leave in the objects: one rule for each kind of place.

Note [What replicas leave]
When a run ends, the images become one.

    in all replicas the same object, or equal      it
      plain values, or equal tensors
    running statistics                             the mean by rows
    numbers on a module, and tensors like the      the lead's, with a warning if they
      one before                                   differ
    numbers and other values elsewhere             a `PerReplica`; in the next run each
                                                   replica goes on with its own
    items appended to a list that no object has    all items, in the order of appending
    lists of one length                            item by item
    keys and members that only some have           those of all
    a tensor that replicas wrote in place          where one replica wrote: its numbers;
                                                   where several did: the lead's, with a
                                                   warning if they differ
    anything else                                  a `PerReplica`

A replica without rows took no part. What it goes on with is what it had before.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import nn

from torchstrategy._base.distributed_values import ABSENT, PerReplica
from torchstrategy._base.plain import PLAIN, are_equal
from torchstrategy._turns import refusals
from torchstrategy._turns.held import Contents
from torchstrategy._turns.image import Exchange, Image
from torchstrategy._turns.numbers import are_same_numbers, same_places
from torchstrategy._turns.parts import MISSING, OPEN, dict_of

# Told of numbers that differ, of which only the lead's are kept: the id of where they
# are, what to call them, the lead's, and those of the others.
TellLost = Callable[[int, str, Any, Sequence[Any]], None]


@final
class Merging:
    """Makes one image of those of all replicas.

    Args:
        exchange: Knows what the objects held before.
        images: Of the replicas that took part, by their numbers; all were taken off.
        num_replicas: How many replicas there are.
        fractions: How many of the rows each of them had.
        written: The positions of tensors of which replicas have their own.
        appended: What was appended to lists, in that order, by the ids of the lists.
        averages: Whether running statistics become the mean; else the lead's.
        left_alone: The names in some tables, by the ids of these, that keep what they
            had.
        tell_lost: Is told of numbers that are lost.
    """

    def __init__(
        self,
        exchange: Exchange,
        images: Mapping[int, Image],
        num_replicas: int,
        fractions: Sequence[float],
        written: Collection[int],
        appended: Mapping[int, Sequence[Any]],
        averages: bool,
        left_alone: Mapping[int, Collection[str]],
        tell_lost: TellLost,
    ) -> None:
        self._exchange, self._reached = exchange, exchange.reached
        self._present = list(images)
        self._images = list(images.values())
        self._num_replicas, self._fractions = num_replicas, fractions
        self._written = written
        self._appended, self._left_alone = appended, left_alone
        self._made: dict[tuple[int, ...], PerReplica] = {}
        self._averages, self._tell_lost = averages, tell_lost

    def merge(self, users: Image) -> None:
        """Gives the program's image what the replicas leave."""
        users.containers, users.places = {}, {}
        for key in dict.fromkeys(k for image in self._images for k in image.containers):
            users.containers[key] = self._merge_container(key)
        for i in dict.fromkeys(i for image in self._images for i in image.places):
            column = [self._exchange.content(image, i) for image in self._images]
            users.places[i] = self._merge_value(column, self._exchange.places[i])
        self._merge_states(users)
        # What may be refused was refused: from here on memory is written.
        for i, value in self._merge_tensors(users):
            memory = self._exchange.home[i]
            if memory.shape == value.shape:
                memory.copy_(value)
            else:
                self._exchange.home[i] = value.to(memory.device, copy=True)

    # Containers

    def _merge_container(self, key: int) -> Contents:
        base = self._exchange.base.of(key)
        columns = [self._exchange.contents(image, key) for image in self._images]
        container = self._reached.containers[key]
        is_module = key in self._reached.in_modules
        if is_module and self._reached.details.is_hooks(key):
            # Each replica has registered the same hooks, under numbers of its own.
            return columns[0]
        if isinstance(base, dict):
            return self._merge_table(key, columns, base)
        if isinstance(container, set):
            return list(dict.fromkeys(item for column in columns for item in column))
        have_one_length = len(set(map(len, columns))) == 1
        is_of_object = (
            key in self._reached.in_modules or key in self._reached.in_objects
        )
        if key in self._appended and not (is_of_object and have_one_length):
            return [*base, *self._appended[key]]
        if not have_one_length:
            return list(columns[0])
        return [
            self._merge_value(column, base[i] if i < len(base) else MISSING)
            for i, column in enumerate(zip(*columns, strict=True))
        ]

    def _merge_table(
        self, key: int, columns: Sequence[Contents], base: Contents
    ) -> Contents:
        is_module = key in self._reached.in_modules
        merged: dict[Any, Any] = {}
        for name in dict.fromkeys(n for column in columns for n in column):
            column = [one.get(name, MISSING) for one in columns]
            before = base.get(name, MISSING)
            if name in self._left_alone.get(key, ()):
                value = before
            elif is_module:
                value = self._merge_on_module(key, name, column, before)
            else:
                value = self._merge_value(column, before)
            if value is not MISSING:
                merged[name] = value
        return merged

    # Values

    def _merge_value(self, column: Sequence[Any], before: Any) -> Any:
        """What a place holds after the run, which belongs to no module."""
        first = column[0]
        # A replica that took no part goes on with its own, if it has one.
        has_absent = len(self._present) < self._num_replicas and is_kept(before)
        if are_one(column) and not has_absent:
            return first
        there = [value for value in column if value is not MISSING]
        if not has_absent and (len(there) == 1 or are_one(there)):
            return there[0]
        return self._of_each(column, before)

    def _merge_on_module(
        self, key: int, name: Any, column: Sequence[Any], before: Any
    ) -> Any:
        first, *others = column
        if are_one(column):
            return first
        are_plain = all(v is MISSING or isinstance(v, PLAIN) for v in column)
        if are_plain and first is not MISSING:
            self._tell_lost(key, self._name(key, name), first, others)
            return first
        if any(isinstance(value, (nn.Module, nn.Parameter)) for value in column):
            raise RuntimeError(refusals.made_part(self._name(key, name)))
        if all(isinstance(value, torch.Tensor) for value in column):
            is_buffer = self._reached.details.is_buffers(key)
            is_running = is_buffer and name in ("running_mean", "running_var")
            if is_running and len({v.shape for v in column}) == 1 and self._averages:
                where = before if isinstance(before, torch.Tensor) else first
                own = [value.to(where.device) for value in column]
                return mean_of(where, own, self._fractions)
            if is_buffer and len({value.shape for value in column}) > 1:
                raise RuntimeError(
                    refusals.unlike_shapes(
                        self._name(key, name),
                        [tuple(value.shape) for value in column],
                        self._present,
                    )
                )
        if isinstance(first, torch.Tensor) and (
            self._reached.details.is_buffers(key)
            or (isinstance(before, torch.Tensor) and first.shape == before.shape)
        ):
            self._tell_lost(key, self._name(key, name), first, others)
            return first
        kinds = set(map(type, column))
        is_sequence = len(kinds) == 1 and type(first) in (list, tuple)
        if is_sequence and len(set(map(len, column))) == 1:
            return type(first)(
                self._merge_on_module(key, f"{name}[{i}]", items, MISSING)
                for i, items in enumerate(zip(*column, strict=True))
            )
        if kinds == {dict} and all(value.keys() == first.keys() for value in others):
            return {
                k: self._merge_on_module(
                    key, f"{name}[{k!r}]", [value[k] for value in column], MISSING
                )
                for k in first
            }
        return self._merge_value(column, before)

    def _of_each(self, column: Sequence[Any], before: Any) -> PerReplica:
        """A value of each replica. One that took no part keeps what it had."""
        components: list[Any] = [ABSENT] * self._num_replicas
        for r, value in zip(self._present, column, strict=True):
            components[r] = ABSENT if value is MISSING else value
        if before is not MISSING:
            for r in set(range(self._num_replicas)) - set(self._present):
                earlier = component_of(before, r)
                # A sum goes on with its part; of outputs, there are none of this batch.
                if isinstance(earlier, _SUMMED):
                    components[r] = earlier
        # Two places that hold one object in each replica hold one value after the run.
        key = tuple(map(id, components))
        if key in self._made:
            return self._made[key]
        made = self._made[key] = PerReplica(components, is_kept=True)
        for r in range(self._num_replicas):
            if components[r] is ABSENT and before is not MISSING:
                made._earlier[r] = component_of(before, r)
        return made

    def _name(self, key: int, name: Any) -> str:
        return self._reached.details.name_in(key, str(name))

    # Memory

    def _merge_tensors(self, users: Image) -> list[tuple[int, torch.Tensor]]:
        """The positions of the program's own tensors, with what is to be written."""
        writes: list[tuple[int, torch.Tensor]] = []
        for i in sorted(self._written):
            memory = self._exchange.home[i]
            own = [image.memory[i].to(memory.device) for image in self._images]
            is_running = i in self._reached.running
            if all(are_same_numbers(one, memory) for one in own):
                continue
            users.versions[i] = max(image.versions[i] for image in self._images)
            if is_running and not self._averages:
                writes.append((i, own[0]))
            elif is_running and memory.is_floating_point():
                writes.append((i, mean_of(memory, own, self._fractions)))
            else:
                writes.append((i, self._merge_written(i, memory, own)))
        return writes

    def _merge_written(
        self, i: int, memory: torch.Tensor, own: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        first, *others = own
        if all(are_same_numbers(one, first) for one in others):
            return first
        if any(one.is_sparse or one.shape != memory.shape for one in own):
            return first
        result, conflicts = first.clone(), False
        is_new = ~same_places(first, memory)
        for one in others:
            is_written = ~same_places(one, memory)
            conflicts |= bool((is_written & is_new & ~same_places(one, result)).any())
            result = torch.where(is_written & ~is_new, one, result)
            is_new |= is_written
        if conflicts:
            tensor = self._reached.tensors[i]
            self._tell_lost(
                id(tensor), self._reached.details.shown(tensor), first, others
            )
        return result

    def _merge_states(self, users: Image) -> None:
        users.states = {}
        for i in dict.fromkeys(i for image in self._images for i in image.states):
            base = self._exchange.states[i]
            own = [image.states.get(i, base) for image in self._images]
            users.states[i] = own[0]
            array = self._reached.opaque[i]
            others = [one for one in own[1:] if one != own[0]]
            if others and isinstance(array, (np.ndarray, bytearray)):
                dtype = getattr(array, "dtype", np.dtype(np.uint8))
                numbers = [np.frombuffer(one, dtype) for one in (own[0], *others)]
                name = self._reached.details.name_of(array)
                self._tell_lost(id(array), name, numbers[0], numbers[1:])


_SUMMED = (int, float, complex)


def component_of(value: Any, replica: int) -> Any:
    """What a replica begins with where the program has a value."""
    if type(value) is tuple:
        return tuple([component_of(item, replica) for item in value])
    if not _is_kept_value(value) or replica >= len(value._components):
        return value
    own = value._components[replica]
    if own is ABSENT:
        return value._earlier.get(replica, MISSING)
    return own


def is_kept(value: Any) -> bool:
    """Whether a value is one that replicas have left in an object, or holds one."""
    if type(value) is tuple:
        return any(map(is_kept, value))
    return _is_kept_value(value)


def _is_kept_value(value: Any) -> bool:
    return type(value) is PerReplica and value.is_kept


def are_one(column: Sequence[Any]) -> bool:
    """Whether values of all replicas are one: an object, or equal plain values."""
    first = column[0]
    return all(value is first or _are_equal(value, first) for value in column[1:])


def _are_equal(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        is_trained = value.requires_grad or other.requires_grad
        return not is_trained and are_same_numbers(value, other)
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if type(value) in (list, tuple, deque):
        return len(value) == len(other) and all(map(_are_equal_or_same, value, other))
    if type(value) in OPEN and isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _are_equal_or_same(item, other[key]) for key, item in value.items()
        )
    if isinstance(value, (set, frozenset)):
        return bool(value == other)
    inside = dict_of(value)
    if dataclasses.is_dataclass(value) and inside is not None:
        return _are_equal(inside, dict_of(other))
    return are_equal(value, other)


def _are_equal_or_same(value: Any, other: Any) -> bool:
    return value is other or _are_equal(value, other)


def mean_of(
    memory: torch.Tensor, own: Sequence[torch.Tensor], fractions: Sequence[float]
) -> torch.Tensor:
    """The mean of running statistics by rows.

    A number that no replica has changed stays as it is: a mean of equal numbers could
    be off by a bit.
    """
    weighed = [one * f for one, f in zip(own, fractions, strict=True) if f]
    is_as_before = torch.stack([same_places(one, memory) for one in own]).all(0)
    return torch.where(is_as_before, memory, torch.stack(weighed).sum(0))
