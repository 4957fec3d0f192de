"""What containers hold, compared by identity.

A run compares at each hand-over, and few objects change in between. So the contents of
all containers are in flat lists, which are compared without a Python call for each.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, final

# A container whose contents are exchanged: a dict, list, set or deque, or one of their
# subclasses that reads and writes as they do; or the attributes of a class.
Container = Any
# What a container holds: a dict, or a list of the items.
Contents = Any


class _Span(NamedTuple):
    """Where the contents of a container are in the flat lists."""

    is_table: bool
    names: int  # where the names of a table begin
    values: int  # where the values, or the items, begin
    size: int


@final
class Held:
    """What some containers held when this was made.

    Args:
        containers: The containers, by their ids.
    """

    def __init__(self, containers: Mapping[int, Container]) -> None:
        self.containers = containers
        full = [c for c in containers.values() if c]
        # Empty ones are looked at apart: to chain nothing takes as long as to chain.
        self._empty = (
            [c for c in containers.values() if not c]
            if len(full) < len(containers)
            else []
        )
        # The order of an `OrderedDict` is known to its own methods only.
        self._tables = [
            c for c in full if isinstance(c, dict) and not isinstance(c, OrderedDict)
        ]
        self._others = [c for c in full if isinstance(c, _WITH_OWN_METHODS)]
        self._items = [c for c in full if not isinstance(c, _TABLES)]
        self._sizes = self._measure()
        self._names = [*self._chain_names()]
        self._values = [*self._chain_values()]

    def of(self, key: int) -> Contents:
        """What a container held, as a new dict or list."""
        span = self._spans.get(key)
        if span is None:
            return {} if isinstance(self.containers[key], _TABLES) else []
        values = self._values[span.values : span.values + span.size]
        if not span.is_table:
            return values
        names = self._names[span.names : span.names + span.size]
        return dict(zip(names, values, strict=True))

    def is_same(self) -> bool:
        """Whether all containers hold the same objects, in the same order."""
        return (
            not any(self._empty)
            and self._measure() == self._sizes
            and all(map(is_, self._chain_values(), self._values))
            and all(map(is_, self._chain_names(), self._names))
        )

    def differing(self) -> list[int]:
        """The ids of the containers that hold something else now."""
        return [
            key
            for key, container in self.containers.items()
            if not is_same(self.of(key), container)
        ]

    def values(self) -> list[Any]:
        """All that the containers held."""
        return self._values

    @cached_property
    def _spans(self) -> dict[int, _Span]:
        key_of = {id(container): key for key, container in self.containers.items()}
        spans: dict[int, _Span] = {}
        names = values = 0
        full = [*self._tables, *self._others, *self._items]
        for container, count in zip(full, self._sizes, strict=True):
            is_table = isinstance(container, _TABLES)
            spans[key_of[id(container)]] = _Span(is_table, names, values, count)
            names += count if is_table else 0
            values += count
        return spans

    def _measure(self) -> list[int]:
        return [
            *map(len, self._tables),
            *map(len, self._others),
            *map(len, self._items),
        ]

    def _chain_names(self) -> Iterable[Any]:
        return chain(
            chain.from_iterable(self._tables), chain.from_iterable(self._others)
        )

    def _chain_values(self) -> Iterable[Any]:
        return chain(
            # The values of a subclass of dict may be computed.
            chain.from_iterable(map(dict.values, self._tables)),
            chain.from_iterable(map(_values_of, self._others)),
            chain.from_iterable(self._items),
        )


def is_same(contents: Contents, container: Container) -> bool:
    """Whether a container, or contents, has the very objects that contents have."""
    if len(contents) != len(container):
        return False
    if not contents:
        return True
    if isinstance(contents, dict):
        values = _values_of(container)
        return all(map(is_, contents.values(), values)) and all(
            map(is_, contents, container)
        )
    return all(map(is_, contents, container))


def contents_of(container: Container) -> Contents:
    """What a container holds now."""
    if isinstance(container, types.MappingProxyType):
        return dict(container)
    if isinstance(container, OrderedDict):
        # Its order is its own, and `dict.items` would not keep it.
        return dict(OrderedDict.items(container))
    if isinstance(container, dict):
        return dict(dict.items(container))
    return list(container)


def fill(container: Container, contents: Contents) -> None:
    """Lets a container, other than a class, hold something else.

    It stays the same object.

    A loop over a table may stand still at a hand-over. It goes on if the keys are the
    same, since then only values are written.
    """
    if isinstance(container, dict):
        # A dict's own methods: those of a subclass may do more. But an `OrderedDict`
        # has a list of its keys besides, which `dict.clear` leaves as it is.
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        if list(container) == list(contents):
            for key, value in contents.items():
                if kind.__getitem__(container, key) is not value:
                    kind.__setitem__(container, key, value)
            return
        kind.clear(container)
        kind.update(container, contents)
    elif isinstance(container, list):
        container[:] = contents
    elif isinstance(container, deque):
        container.clear()
        container.extend(contents)
    else:
        container.clear()
        container.update(contents)


def write_class(cls: type, then: Contents, now: Contents) -> None:
    """Gives a class other attributes in the place of those that it has."""
    for name in then.keys() - now.keys():
        type.__delattr__(cls, name)
    for name, value in now.items():
        if name not in then or then[name] is not value:
            type.__setattr__(cls, name, value)


def _values_of(table: Any) -> Iterable[Any]:
    values: Iterable[Any]
    if isinstance(table, OrderedDict):
        values = OrderedDict.values(table)
    elif isinstance(table, dict):
        values = dict.values(table)  # that of a subclass may compute them
    else:
        values = table.values()
    return values


_TABLES = (dict, types.MappingProxyType)
_WITH_OWN_METHODS = (OrderedDict, types.MappingProxyType)
