"""The `__dict__`s in which the user's modules and tensors have attributes.

Each comes with those of the replicas' copies.

A `__dict__` is compared and written like any container. But nearly all tensors of a
model have an empty one, and a run is not to look into thousands of these:
`AttributesOfTensors` takes one look at all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from torchstrategy._base.objects.attribute_contents import CopiedThing
from torchstrategy._base.objects.changes import MISSING, Edit, Snapshot


@final
class AttributesOfTensors:
    """The attributes of some tensors, when this was made or last taken again.

    Args:
        tables: The `__dict__`s of the tensors, by keys of the caller's.
    """

    def __init__(self, tables: dict[str, dict[str, Any]]) -> None:
        self._tables = tables
        self._all = list(tables.values())
        self.take()

    def take(self) -> None:
        """Remembers the attributes of now."""
        # Mostly no tensor has any. Then nothing has to be kept, and it takes one look
        # to see that nothing has changed.
        self._known = Snapshot(self._tables) if any(self._all) else None

    def edits(self) -> list[Edit]:
        """What has changed since."""
        if self._known is None and not any(self._all):
            return []
        if self._known is not None:
            return list(self._known.edits())
        return [
            Edit(path, name, MISSING, value)
            for path, one in self._tables.items()
            for name, value in one.items()
        ]

    def forget(self, path: str, name: str) -> None:
        """Counts an attribute as changed until this is taken again.

        It does so whatever the attribute is, and if it is gone.
        """
        if path not in self._tables:
            return
        if self._known is None:
            self._known = Snapshot(self._tables)
        self._known.forget(path, name)


def tables_of_tensors(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    of_replicas: Sequence[Sequence[torch.Tensor]],
) -> list[CopiedThing]:
    """The `__dict__`s of some of the user's tensors, with those of the replicas'."""
    inside = zip(*(map(vars, of_replica) for of_replica in of_replicas), strict=True)
    places = zip(names, map(vars, tensors), inside, strict=True)
    return [
        CopiedThing(path=name, original=table, local=of_all)
        for name, table, of_all in places
    ]


def by_path(things: Iterable[CopiedThing]) -> dict[str, CopiedThing]:
    """The same things by their paths, which all differ.

    Two models may be of one class.
    """
    seen: Counter[str] = Counter()
    made = {}
    for thing in things:
        seen[thing.path] += 1
        path = (
            thing.path
            if seen[thing.path] == 1
            else f"{thing.path} ({seen[thing.path]})"
        )
        made[path] = thing._replace(path=path)
    return made
