"""What modules are made of: which parameters, buffers, children and hooks they have, and whether that has changed."""

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
    """An entry of a table of a module that is not what it was; `MISSING`: it was, or is, not there."""

    position: int  # of the module
    table: str
    name: Any  # of a hook, its number
    before: object
    after: object

    def verb(self) -> str:
        """What was done to it."""
        return "made" if self.before is MISSING else "taken away" if self.after is MISSING else "replaced"

    def is_value(self) -> bool:
        """Whether only a buffer has another tensor than it had."""
        return self.table == "_buffers" and isinstance(self.before, Tensor) and isinstance(self.after, Tensor)


@final
class Snapshot:
    """The entries that the tables of modules had when this was made.

    Args:
        insides: The `__dict__` of each module.
        counts_hooks: Whether hooks are looked at only where torch has counted new ones, as it does where they are
            registered; what is put straight into an empty table is not noticed then.
    """

    def __init__(self, insides: Sequence[dict[str, Any]], counts_hooks: bool = False) -> None:
        self._counts_hooks = counts_hooks
        kinds = (PART_TABLES, HOOK_TABLES)
        self._places = [(position, table) for kind in kinds for position in range(len(insides)) for table in kind]
        self._tables: list[dict[Any, Any]] = [insides[position][table] for position, table in self._places]
        self._num_parts = len(insides) * len(PART_TABLES)
        self.is_known()

    def is_known(self) -> None:
        """From here on, what the tables hold now is what they had."""
        self._known = [dict(table) for table in self._tables]
        self._without_empty_hooks = [*self._tables[: self._num_parts], *filter(None, self._tables[self._num_parts :])]
        self._next_hook = RemovableHandle.next_id
        self._held = entries_of(self._tables)

    def is_same(self) -> bool:
        """Whether the tables hold the very same objects in the same order."""
        next_hook = RemovableHandle.next_id
        may_have_hooks = next_hook != self._next_hook or not self._counts_hooks
        is_same = same(self._held, entries_of(self._tables if may_have_hooks else self._without_empty_hooks))
        if is_same:
            self._next_hook = next_hook
        return is_same

    def changes(self) -> Iterator[Edit]:
        """Where the tables differ from what they had; in what order they have it counts for nothing."""
        if self.is_same():
            return
        for (position, table), known, now in zip(self._places, self._known, self._tables, strict=True):
            for name in {**known, **now}:
                before, after = known.get(name, MISSING), now.get(name, MISSING)
                if before is not after:
                    yield Edit(position, table, name, before, after)


class Entries(NamedTuple):
    """What some tables hold, and by what names."""

    names: list[Any]
    values: list[object]


def entries_of(tables: Sequence[dict[Any, Any]]) -> Entries:
    """What tables hold, one list for all of them. Most of them hold nothing."""
    full = list(filter(None, tables))
    return Entries(list(chain.from_iterable(full)), list(chain.from_iterable(map(_VALUES, full))))


def same(first: Entries, second: Entries) -> bool:
    """Whether two hold the very same objects by the same names; what they are equal to is not asked."""
    are_alike = len(first.values) == len(second.values) and first.names == second.names
    return are_alike and all(map(is_, first.values, second.values))
