"""How changes of the user's objects, and of the replicas' copies, are seen.

Modules, the containers in their attributes and the attributes of trainers are all seen
to change in one way: a snapshot keeps the objects that some containers hold, and
compares them with those that the containers hold later. Objects are compared by
identity: `==` may be slow, or the user's own. What is written inside of tensors,
`_base/writes` sees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from operator import is_, itemgetter, methodcaller
from typing import Any, NamedTuple, final

from torchstrategy._base.objects.attribute_contents import (
    SEQUENCES,
    attributes,
    table_type,
)

MISSING = object()
# Takes the place of all sizes: what the containers hold counts as changed.
_FORGOTTEN = -1


class Edit(NamedTuple):
    """A change of an entry in a table. `MISSING`: there was, or is, no such entry."""

    place: Any  # which table: the key that a snapshot has for it
    name: Any
    before: object
    after: object

    def verb(self) -> str:
        """What was done to the entry."""
        if self.before is MISSING:
            return "made"
        return "taken away" if self.after is MISSING else "replaced"

    def apply(self, table: dict[Any, Any]) -> None:
        """Makes the same change in another table."""
        if self.after is MISSING:
            table.pop(self.name, None)
        else:
            table[self.name] = self.after


def edits(
    before: Mapping[Any, Any], after: Mapping[Any, Any], place: Any = None
) -> Iterator[Edit]:
    """The entries in which two tables differ.

    The order of the entries does not matter.
    """
    for name in {**before, **after}:
        one, other = before.get(name, MISSING), after.get(name, MISSING)
        if one is not other:
            yield Edit(place, name, one, other)


@final
class Snapshot:
    """What some containers held when this was made, or when it was last taken again.

    Args:
        containers: Dictionaries, lists, sets, or objects with attributes, by keys that
            the caller chooses.
        left_out: Names in tables. What stands there is not looked at, and neither is
            the order of all names.
    """

    def __init__(
        self, containers: Mapping[Any, Any], left_out: Set[str] = frozenset()
    ) -> None:
        self._left_out = left_out
        self._tables = {
            key: container
            for key, container in containers.items()
            if _is_table(container)
        }
        others = {
            key: container
            for key, container in containers.items()
            if key not in self._tables
        }
        # Lists come first, of which there may be many.
        lists = {
            key: container
            for key, container in others.items()
            if type(container) is list
        }
        self._lists = list(lists.values())
        self._others = {**lists, **others}
        self.take()

    def take(self) -> None:
        """Remembers what the containers hold now; later calls compare with this."""
        self._known = {key: dict(table) for key, table in self._tables.items()}
        self._known_items = {
            key: _items(container) for key, container in self._others.items()
        }
        # Nearly all are tables of modules, and most of these are empty. So there is no
        # call for each of them.
        self._empty = [table for table in self._tables.values() if not table]
        self._full = [table for table in self._tables.values() if table]
        if self._left_out:
            names = (
                [name for name in table if name not in self._left_out]
                for table in self._full
            )
            # Of a single name, an `itemgetter` would return no tuple.
            self._readers = [
                itemgetter(*looked_at, looked_at[0]) for looked_at in names
            ]
        self._sizes, self._names, self._values = self._contents()
        # Names of other types may be equal and not the same, as 1 and True, or have an
        # `==` of their own, as tensors.
        self._are_plain = {str}.issuperset(map(type, self._names))

    def forget(self, place: Any, name: Any) -> None:
        """Drops an entry of a table.

        The entry then counts as changed until the snapshot is taken again.
        """
        self._known[place][name] = object()  # which no table holds
        self._sizes, self._names, self._values = [_FORGOTTEN], [], []

    def is_same(self) -> bool:
        """Whether the containers hold the same objects in the same order."""
        if any(self._empty):
            return False
        if not (self._full or self._others):
            return not self._sizes
        try:
            sizes, names, values = self._contents()
        except KeyError:  # a name is no longer there
            return False
        if sizes != self._sizes or not all(map(is_, values, self._values)):
            return False
        return (
            names == self._names
            if self._are_plain
            else all(map(is_, names, self._names))
        )

    def edits(self) -> Iterator[Edit]:
        """The entries of tables that have changed."""
        for place in self.differing():
            if place in self._known:
                yield from edits(self._known[place], self._tables[place], place)

    def differing(self) -> list[Any]:
        """The keys of the containers that hold other objects, or in another order."""
        if self.is_same():
            return []
        changed = [
            k
            for k, known in self._known.items()
            if not are_same(_all_in(self._tables[k]), _all_in(known))
        ]
        return changed + [
            key
            for key, old in self._known_items.items()
            if not are_same(_items(self._others[key]), old)
        ]

    def _contents(self) -> tuple[list[int], list[Any], list[Any]]:
        """How many objects each container holds, the names in tables, and the rest."""
        names: list[Any] = []
        values: list[Any] = []
        if self._left_out:
            for read, table in zip(self._readers, self._full, strict=True):
                values.extend(read(table))
        else:
            names.extend(chain.from_iterable(self._full))
            values.extend(chain.from_iterable(map(_values_of, self._full)))
        if not self._others:
            return list(map(len, self._full)), names, values
        others = list(
            map(_items, islice(self._others.values(), len(self._lists), None))
        )
        values += chain.from_iterable((*self._lists, *others))
        sizes = [*map(len, self._full), *map(len, self._lists), *map(len, others)]
        return sizes, names, values


_values_of = methodcaller("values")


def _is_table(container: Any) -> bool:
    """Whether a container is a dictionary and nothing more."""
    return type(container) is dict or (
        type(container) is OrderedDict and not vars(container)
    )


def edits_of(snapshots: Sequence[Snapshot]) -> list[list[Edit]]:
    """For each of some snapshots, the entries of tables that have changed."""
    return [list(snapshot.edits()) for snapshot in snapshots]


def are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(items) == len(others) and all(map(is_, items, others))


def _all_in(table: dict[Any, Any]) -> list[Any]:
    return [*table, *table.values()]


def _items(container: Any) -> list[Any]:
    if type(container) is list:
        return container[:]
    items = list(container) if isinstance(container, SEQUENCES) else []
    if isinstance(container, dict):
        table = table_type(container)
        items += [*table.keys(container), *table.values(container)]
    inside = attributes(container)
    return [*items, *inside, *inside.values()]
