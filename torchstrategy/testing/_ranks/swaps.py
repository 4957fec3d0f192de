"""Collectives that ranks call in another order, and that fit together all the same.

Two ranks add up `a` and `b`, one the other way round. The sizes are the same, so nothing stops, and each tensor holds
a sum of both.

Note [What is a swap]: Once, rank 0 had `a` where rank 1 had `b`; and once, rank 0 had `b` where rank 1 had `a`. One of
the two alone is no fault: each rank may have names, and lines, of its own. Where a collective has a root, ranks change
roles, and call `tensor` and `buffer` by turns; so only those without a root are compared.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, final

_Names = frozenset[str]
_WITHOUT_ROOT = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
_MOST_KEPT = 256


class Said(NamedTuple):
    """What one rank has called.

    Attributes:
        rank: The rank.
        names: What its program calls the tensor; empty if it has no name.
        line: Where it called it.
        words: The whole, for messages.
    """

    rank: int
    names: _Names
    line: str
    words: str


def is_compared(kind: str) -> bool:
    """Whether collectives of a kind are looked at."""
    return kind in _WITHOUT_ROOT


@final
class Swaps:
    """What ranks have called at the same time under different names."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, dict[tuple[_Names, _Names], tuple[Said, Said]]] = {}

    def find(self, group: Hashable, first: Said, other: Said) -> str | None:
        """A message, if two ranks have called two collectives of a group the other way round."""
        here, there = _apart(first, other)
        if not here or not there:
            return None
        seen = self._seen.setdefault((group, first.rank, other.rank), {})
        for (before_here, before_there), (before, before_other) in seen.items():
            if here & before_there and there & before_here:
                return _message((before, before_other), (first, other), (before_here, before_there))
        if len(seen) < _MOST_KEPT:
            seen[here, there] = first, other
        return None


def _apart(first: Said, other: Said) -> tuple[_Names, _Names]:
    """The names that only one of two ranks has, or its line, if neither has a name."""
    if first.names or other.names:
        return first.names - other.names, other.names - first.names
    if first.line == other.line:
        return frozenset(), frozenset()
    return frozenset((first.line,)), frozenset((other.line,))


def _message(before: tuple[Said, Said], now: tuple[Said, Said], names: tuple[_Names, _Names]) -> str:
    rows = []
    for place in (0, 1):
        mine, others = min(names[place]), min(names[1 - place])
        rows.append(f"  rank {now[place].rank}: {before[place].words} of `{mine}`")
        rows.append(f"          {now[place].words} of `{others}`")
    return (
        f"Ranks {now[0].rank} and {now[1].rank} have called collectives of the same size in another order:\n"
        + "\n".join(rows)
        + "\nEach tensor has numbers of both. Call them in the same order on all ranks."
    )
