"""The large attributes that wait until a step reads them, and those it has read.

`late_attributes` makes an attribute wait in one copy of a module. Here is what concerns
all copies: the replica that reads an attribute first makes the copies of all, since
after the run all of them are compared and merged; and what the user has put in the
place of an attribute may wait in its turn.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from torch import nn

from torchstrategy._base.objects.attribute_contents import (
    CopiedThing,
    data_in,
    find_copied_things,
)
from torchstrategy._base.objects.changes import MISSING, Edit
from torchstrategy._copies.attributes.attribute_tables import by_path
from torchstrategy._copies.attributes.late_attributes import (
    NO_DATA,
    Late,
    LateCopies,
    Later,
    find_late,
    has_containers,
    is_large,
    postpone,
    settle,
)
from torchstrategy._copies.modules.module_replica import uncopyable_error
from torchstrategy._copies.references.deep_copies import deep_copy

Key = tuple[str, str]  # the path of a module, and the name of an attribute


@final
class WaitingAttributes:
    """The attributes of some modules that replicas get when a step first reads them.

    Args:
        modules: By path: the `__dict__` of a module, with those of its copies.
        copies: By path: the copies of a module.
        late: The attributes that wait.
        take: A method that is called with the containers in an attribute, by path, when
            replicas have their copies.

    Attributes:
        brought: Those that a step has read since the owner has listed all containers
            anew.
        has_brought: Whether a step has read one since the run began.
    """

    def __init__(
        self,
        modules: dict[str, CopiedThing],
        copies: dict[str, list[nn.Module]],
        late: Late,
        take: Callable[[dict[str, CopiedThing]], None],
    ) -> None:
        self._modules = modules
        self._copies = copies
        # Else the copies of a model would be freed late, by Python's collector.
        self._take = weakref.WeakMethod(take)
        self._bringing = threading.Lock()
        self._waiting: set[Key] = set()
        self.brought: list[LateCopies] = []
        self.has_brought = False
        paths = list(modules)
        for (position, name), later in late.items():
            self._let_wait(paths[position], name, later)

    def _let_wait(self, path: str, name: str, later: Later) -> None:
        later.bring = functools.partial(self.bring, path, name)
        self._waiting.add((path, name))

    def find(self, edits: Sequence[Edit], new: Iterable[Any]) -> set[Key] | None:
        """Which attributes that the user has replaced may wait.

        It is None if one that waits may wait no longer.

        An attribute may not wait if another one holds a part of it.
        """
        values = [edit.after for edit in edits if edit.after is not MISSING]
        are_large = any(map(is_large, map(data_in, values)))
        if not are_large and not (self._waiting and any(map(has_containers, new))):
            return set()
        paths = list(self._modules)
        modules = [copies[0] for copies in self._copies.values()]
        found = find_late(modules, [place.original for place in self._modules.values()])
        late = {(paths[position], name) for position, name in found}
        edited = {(edit.place, edit.name) for edit in edits}
        return late & edited if self._waiting - edited <= late else None

    def replace(
        self, edits: Sequence[Edit], waiting: Iterable[Key]
    ) -> dict[Key, Later]:
        """Takes the attributes that the user has replaced, of which some wait.

        Returns what stands for these.
        """
        self._waiting -= {(edit.place, edit.name) for edit in edits}
        laters = {}
        for path, name in waiting:
            laters[path, f".{name}"] = later = Later(f"{path}.{name}")
            self._let_wait(path, name, later)
            for copied in self._copies[path]:
                postpone(copied, {name})
        return laters

    def bring(self, path: str, name: str) -> None:
        """Copies an attribute of a module for all replicas, if it waits.

        Called on the thread of any replica.
        """
        with self._bringing:
            _, original, insides = self._modules[path]
            waiting = [
                r for r, inside in enumerate(insides) if type(inside.get(name)) is Later
            ]
            if not waiting:
                return
            copies = self._copy(f"{path}.{name}", original[name], len(waiting))
            containers: dict[int, CopiedThing] = {}
            # Else a replica has lost the attribute, which is merged as a whole.
            if len(waiting) == len(insides):
                containers, _, _ = find_copied_things(
                    [CopiedThing(f"{path}.{name}", original[name], copies)]
                )
            brought = LateCopies.of(path, name, copies, by_path(containers.values()))
            take = self._take()
            if take is not None:
                take(brought.containers)
            self.brought.append(brought)
            self.has_brought = True
            self._waiting.discard((path, name))
            # Last, since other replicas go on as soon as they find their copies.
            for r, copied in zip(waiting, copies, strict=True):
                insides[r][name] = copied
        for module in self._copies[path]:
            settle(module)

    def _copy(self, path: str, value: Any, count: int) -> list[Any]:
        """So many copies of what is nothing but data: replicas have none of it."""
        if data_in(value) is None:
            raise RuntimeError(NO_DATA.format(path=path))
        try:
            return [deep_copy(value, {}) for _ in range(count)]
        except Exception as error:
            raise uncopyable_error(path, error) from error

    def is_brought(self, edit: Edit) -> bool:
        """Whether an edit is no write of a step: a copy replaced what stood for it."""
        if type(edit.before) is not Later:
            return False
        for one in self.brought:
            if (one.path, one.name) == (edit.place, edit.name) and any(
                edit.after is own for own in one.copies
            ):
                return True
        return False
