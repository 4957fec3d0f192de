"""The parameters, buffers, children and hooks of modules, and whether they have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

_VALUES = methodcaller("values")
MISSING = object()
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
PART_TABLES = ("_parameters", "_modules", "_buffers")


class Edit(NamedTuple):
    """A change of an entry in a table of a module, such as `_buffers`. `MISSING`: there was, or is, no such entry."""

    position: int  # the position of the module
    table: str
    name: Any  # for a hook, its number
    before: object
    after: object

    def verb(self) -> str:
        """What was done to the entry."""
        return "made" if self.before is MISSING else "taken away" if self.after is MISSING else "replaced"

    def is_value(self) -> bool:
        """Whether the change only gives a buffer another tensor."""
        return self.table == "_buffers" and isinstance(self.before, Tensor) and isinstance(self.after, Tensor)


@final
class Snapshot:
    """The entries that the tables of modules had when this was made.

    Args:
        insides: The `__dict__` of each module.
        counts_hooks: Whether empty tables of hooks are looked at only if torch has counted new hooks. torch counts a
            hook when it is registered; a hook that is put straight into an empty table is then not noticed.
    """

    def __init__(self, insides: Sequence[dict[str, Any]], counts_hooks: bool = False) -> None:
        self._counts_hooks = counts_hooks
        kinds = (PART_TABLES, HOOK_TABLES)
        self._places = [(position, table) for kind in kinds for position in range(len(insides)) for table in kind]
        self._tables: list[dict[Any, Any]] = [insides[position][table] for position, table in self._places]
        self._num_parts = len(insides) * len(PART_TABLES)
        self.is_known()

    def is_known(self) -> None:
        """Makes the present entries of the tables those that later ones are compared with."""
        self._known = [dict(table) for table in self._tables]
        self._without_empty_hooks = [*self._tables[: self._num_parts], *filter(None, self._tables[self._num_parts :])]
        self._next_hook = RemovableHandle.next_id
        self._held = entries_of(self._tables)

    def is_same(self) -> bool:
        """Whether the tables hold the same objects in the same order, compared by identity."""
        next_hook = RemovableHandle.next_id
        may_have_hooks = next_hook != self._next_hook or not self._counts_hooks
        is_same = same(self._held, entries_of(self._tables if may_have_hooks else self._without_empty_hooks))
        if is_same:
            self._next_hook = next_hook
        return is_same

    def changes(self) -> Iterator[Edit]:
        """The entries that have changed. The order of the entries does not matter."""
        if self.is_same():
            return
        for (position, table), known, now in zip(self._places, self._known, self._tables, strict=True):
            for name in {**known, **now}:
                before, after = known.get(name, MISSING), now.get(name, MISSING)
                if before is not after:
                    yield Edit(position, table, name, before, after)


class Entries(NamedTuple):
    """The names and values in some tables."""

    names: list[Any]
    values: list[object]


def entries_of(tables: Sequence[dict[Any, Any]]) -> Entries:
    """The entries of all tables in one list. Most tables are empty."""
    full = list(filter(None, tables))
    return Entries(list(chain.from_iterable(full)), list(chain.from_iterable(map(_VALUES, full))))


def same(first: Entries, second: Entries) -> bool:
    """Whether two have the same names with the same objects. Objects are compared by identity, and not by `==`."""
    are_alike = len(first.values) == len(second.values) and first.names == second.names
    return are_alike and all(map(is_, first.values, second.values))
