"""Orders of rows from which ranks take their parts: one order, or one per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

_FEWEST, _SHARE, _DEVIATIONS = 8, 0.15, 2.5


def without_repeats(rows: Sequence[int]) -> int:
    """How many rows come before the first one that comes again."""
    seen: set[int] = set()
    for row in rows:
        if row in seen:
            break
        seen.add(row)
    return len(seen)


def are_of_other_orders(rows: Sequence[int], others: Sequence[int], ranks: int) -> bool:
    """Whether two ranks took their parts from orders that each had drawn itself.

    No row comes twice on a rank, and of the rows of one rank, as many are on the other
    as parts of all rows have by chance: a half of them with two ranks. What fills up
    batches, a context around rows, or rows that are drawn one by one give other
    numbers.
    """
    count = min(len(rows), len(others))
    common = len(set(rows) & set(others))
    expected = count / ranks
    # Of the number of common rows of two parts.
    deviation = math.sqrt(expected) * (1 - 1 / ranks)
    allowed = max(_SHARE * expected, _DEVIATIONS * deviation)
    return common >= _FEWEST and abs(common - expected) <= allowed
