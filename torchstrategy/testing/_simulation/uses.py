"""What was done last with each part of a storage."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar, final

T = TypeVar("T")


class Span(NamedTuple):
    """Some bytes of a storage."""

    begin: int  # the first one
    end: float  # the one behind the last; infinite for all that follows


WHOLE = Span(0, math.inf)  # all of a storage


@final
class Uses(Generic[T]):
    """The last use of each byte of a storage, as far as it was used.

    Most operators use all of a storage, and there is nothing to look for. But a storage
    may have thousands of parts, as flat parameters do, of which each operator uses
    some. So parts are kept in order, and do not overlap: a later use takes its bytes
    away from an earlier one.
    """

    __slots__ = ("_begins", "_of_whole", "_parts")

    def __init__(self) -> None:
        # The use of all bytes whose part has no use of its own.
        self._of_whole: tuple[T, ...] = ()
        self._begins: list[int] = []
        self._parts: list[tuple[Span, T]] = []

    def within(self, span: Span) -> Sequence[T]:
        """The uses of which any byte is in a span, in the order of the bytes."""
        if not self._parts:
            return self._of_whole if span.begin < span.end else ()
        first, last = self._places(span)
        return [use for _, use in self._parts[first:last]]

    def all(self) -> Sequence[T]:
        """The uses of all parts."""
        return self.within(WHOLE)

    def put(self, span: Span, use: T) -> None:
        """Notes that this is the last use of a span."""
        if span == WHOLE:
            self._of_whole = (use,)
            if self._parts:
                self._begins, self._parts = [], []
        elif span.begin < span.end:
            self._replace(span, [(span, use)])

    def forget(self, span: Span) -> None:
        """Forgets what was done with a span."""
        if self._parts or self._of_whole:
            self._replace(span, [])

    def _replace(self, span: Span, parts: list[tuple[Span, T]]) -> None:
        if self._of_whole:
            self._begins, self._parts = [0], [(WHOLE, self._of_whole[0])]
            self._of_whole = ()
        first, last = self._places(span)
        if first < last:
            before, use = self._parts[first]
            if before.begin < span.begin:
                parts = [(Span(before.begin, span.begin), use), *parts]
            after, use = self._parts[last - 1]
            if span.end < after.end:
                parts = [*parts, (Span(int(span.end), after.end), use)]
        self._parts[first:last] = parts
        self._begins[first:last] = [part.begin for part, _ in parts]

    def _places(self, span: Span) -> tuple[int, int]:
        """Where the parts that a span overlaps begin and end."""
        if not span.begin < span.end:
            return 0, 0
        first = bisect_right(self._begins, span.begin)
        if first and span.begin < self._parts[first - 1][0].end:
            first -= 1
        return first, max(first, bisect_left(self._begins, span.end))
