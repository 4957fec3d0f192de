"""How changes of the user's objects, and of the replicas' copies, are seen.

Modules, the containers in their attributes and the attributes of trainers are all seen to change in one way: a snapshot
keeps the objects that some containers hold, and compares them with those that the containers hold later. Objects are
compared by identity. What is written inside of a tensor is found by `tensor_versions`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple, final

from torchstrategy._binding.attribute_contents import SEQUENCES, attributes, table_type

_VALUES = methodcaller("values")
MISSING = object()


class Edit(NamedTuple):
    """A change of an entry in a table. `MISSING`: there was, or is, no such entry."""

    place: Any  # which table: the key that a snapshot has for it
    name: Any
    before: object
    after: object

    def verb(self) -> str:
        """What was done to the entry."""
        return "made" if self.before is MISSING else "taken away" if self.after is MISSING else "replaced"

    def apply(self, table: dict[Any, Any]) -> None:
        """Makes the same change in another table."""
        if self.after is MISSING:
            table.pop(self.name, None)
        else:
            table[self.name] = self.after


def edits(before: Mapping[Any, Any], after: Mapping[Any, Any], place: Any = None) -> Iterator[Edit]:
    """The entries in which two tables differ. The order of the entries does not matter."""
    for name in {**before, **after}:
        one, other = before.get(name, MISSING), after.get(name, MISSING)
        if one is not other:
            yield Edit(place, name, one, other)


@final
class Snapshot:
    """What some containers held when this was made, or when it was last taken again.

    Args:
        containers: Dictionaries, lists, sets, or objects with attributes, by keys that the caller chooses.
    """

    def __init__(self, containers: Mapping[Any, Any]) -> None:
        # Nearly all are tables of modules, and most of these are empty. So there is no call for each of them.
        self._tables = {k: c for k, c in containers.items() if type(c) is dict or _is_plain_ordered(c)}
        self._others = {k: c for k, c in containers.items() if k not in self._tables}
        self.take()

    def take(self) -> None:
        """Makes what the containers hold now that with which later contents are compared."""
        self._known = {key: dict(table) for key, table in self._tables.items()}
        self._known_items = {key: _items(container) for key, container in self._others.items()}
        self._sizes, self._held = self._contents()

    def forget(self, place: Any, name: Any) -> None:
        """Drops an entry of a table: it counts as changed, whatever it is, until the snapshot is taken again."""
        self._known[place][name] = _FORGOTTEN
        self._sizes, self._held = [], []

    def is_same(self) -> bool:
        """Whether the containers hold the same objects in the same order."""
        sizes, held = self._contents()
        return sizes == self._sizes and all(map(is_, held, self._held))

    def edits(self) -> Iterator[Edit]:
        """The entries of tables that have changed."""
        if not self.is_same():
            for (place, known), now in zip(self._known.items(), self._tables.values(), strict=True):
                if len(known) != len(now) or not all(map(is_, chain(known, known.values()), chain(now, now.values()))):
                    yield from edits(known, now, place)

    def differing(self) -> list[Any]:
        """The keys of the containers that hold other objects."""
        if self.is_same():
            return []
        now, known = {**self._tables, **self._others}, {**self._known, **self._known_items}
        return [key for key in known if not _are_same(_items(now[key]), _items(known[key]))]

    def held(self) -> list[Any]:
        """The objects that the containers held."""
        return self._held

    def _contents(self) -> tuple[list[int], list[Any]]:
        """How many objects each container holds, and all of them."""
        tables, others = self._tables.values(), list(map(_items, self._others.values()))
        sizes = [*map(len, tables), *map(len, others)]
        full = list(filter(None, tables))  # an empty `OrderedDict` takes longer to iterate over than to skip
        entries = chain(chain.from_iterable(full), chain.from_iterable(map(_VALUES, full)))
        return sizes, [*entries, *chain.from_iterable(others)]


_FORGOTTEN = object()


def _is_plain_ordered(container: Any) -> bool:
    return type(container) is OrderedDict and not vars(container)


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


def _items(container: Any) -> list[Any]:
    if type(container) is list:
        return container[:]
    items = list(container) if isinstance(container, SEQUENCES) else []
    if isinstance(container, dict):
        table = table_type(container)
        items += [*table.keys(container), *table.values(container)]
    inside = attributes(container)
    return [*items, *inside, *inside.values()]
