"""Collectives that ranks call in another order, and that fit together all the same.

Two ranks add up `a` and `b`, one the other way round. The sizes are the same, so
nothing stops, and each tensor holds a sum of both.

Note [What is a swap]: Once, rank 0 had `a` where rank 1 had `b`; and once, rank 0 had
`b` where rank 1 had `a`. Or rank 1 had `c` there, and `a` where rank 0 had `c`: a ring
of any length, as where two ranks go through the same names in other orders. A part of a
ring is no fault: each rank may have names, and lines, of its own. Where a collective
has a root, ranks change roles, and call `tensor` and `buffer` by turns; so only those
without a root are compared.
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
        """A message, if two ranks called two collectives of a group in other orders."""
        here, there = _apart(first, other)
        if not here or not there:
            return None
        seen = self._seen.setdefault((group, first.rank, other.rank), {})
        ring = _ring(seen, here, there)
        if ring is not None:
            return _message([*ring, (first, other)])
        if len(seen) < _MOST_KEPT:
            seen[here, there] = first, other
        return None


def _ring(
    seen: dict[tuple[_Names, _Names], tuple[Said, Said]], here: _Names, there: _Names
) -> list[tuple[Said, Said]] | None:
    """The earlier calls that led the second rank to what the first one calls now.

    It is None if there are no such calls.

    Of several ways it is the shortest one.
    """
    left = dict(seen)
    ways: list[tuple[_Names, list[tuple[Said, Said]]]] = [(there, [])]
    for names, way in ways:  # it grows meanwhile
        for (before_here, before_there), called in list(left.items()):
            if names & before_here:
                if before_there & here:
                    return [*way, called]
                del left[before_here, before_there]
                ways.append((before_there, [*way, called]))
    return None


def _apart(first: Said, other: Said) -> tuple[_Names, _Names]:
    """The names that only one of two ranks has, or its line, if neither has a name."""
    if first.names or other.names:
        return first.names - other.names, other.names - first.names
    if first.line == other.line:
        return frozenset(), frozenset()
    return frozenset((first.line,)), frozenset((other.line,))


def _message(called: list[tuple[Said, Said]]) -> str:
    """What two ranks have called at the same times."""
    rows = []
    for place in (0, 1):
        for number, pair in enumerate(called):
            names = _apart(*pair)[place]
            start = "         " if number else f"  rank {pair[place].rank}:"
            rows.append(f"{start} {pair[place].words} of `{min(names)}`")
    first, other = called[0]
    return (
        f"Ranks {first.rank} and {other.rank} have called collectives of the same size "
        "in another order:\n"
        + "\n".join(rows)
        + "\nEach tensor has numbers of both. Call them in the same order on all ranks."
    )
