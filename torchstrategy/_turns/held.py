"""What containers hold, compared by identity.

A run compares at each hand-over, and few objects change in between. So the contents of
all containers are in flat lists, which are compared without a Python call for each.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any, final

# A container whose contents are exchanged: a dict, list, set or deque, or one of their
# subclasses that reads and writes as they do; or the attributes of a class.
Container = Any
# What a container holds: a dict, or a list of the items.
Contents = Any


@final
class Held:
    """What some containers held when this was made.

    Args:
        containers: The containers, by their ids.
    """

    def __init__(self, containers: Mapping[int, Container]) -> None:
        self.containers = containers
        self._known: dict[int, Contents] = {
            key: contents_of(c) for key, c in containers.items() if c
        }
        # Empty ones are looked at apart: to chain nothing takes as long as to chain.
        self._empty = [c for c in containers.values() if not c]
        self._tables = [c for c in containers.values() if c and _is_table(c)]
        self._items = [c for c in containers.values() if c and not _is_table(c)]
        self._sizes = self._measure()
        self._names = [*chain.from_iterable(self._tables)]
        self._values = [*self._chain_values()]

    def of(self, key: int) -> Contents:
        """What a container held. The caller does not write on it."""
        known = self._known.get(key)
        if known is None:
            return {} if _is_table(self.containers[key]) else []
        return known

    def is_same(self) -> bool:
        """Whether all containers hold the same objects, in the same order."""
        if any(self._empty) or self._measure() != self._sizes:
            return False
        names = chain.from_iterable(self._tables)
        return all(map(is_, self._chain_values(), self._values)) and all(
            map(is_, names, self._names)
        )

    def differing(self) -> list[int]:
        """The ids of the containers that hold something else now."""
        return [
            key
            for key, container in self.containers.items()
            if not is_same(self._known.get(key, ()), container)
        ]

    def values(self) -> list[Any]:
        """All that the containers held."""
        return self._values

    def _measure(self) -> list[int]:
        return [*map(len, self._tables), *map(len, self._items)]

    def _chain_values(self) -> Iterable[Any]:
        return chain(
            chain.from_iterable(map(_values_of, self._tables)),
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


def _is_table(container: Container) -> bool:
    return isinstance(container, (dict, types.MappingProxyType))


def _values_of(table: Any) -> Iterable[Any]:
    # The values of a subclass may be computed.
    return _of_dict(table) if isinstance(table, dict) else table.values()


_of_dict: Callable[[dict[Any, Any]], Iterable[Any]] = dict.values
