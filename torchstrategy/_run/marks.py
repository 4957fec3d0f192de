"""The numbers by which workers see, without a message of its own, whether they are alike.

Each worker adds a few numbers to what it sends with its gradients. The workers get the sums of these. From the sum of a
number and the sum of its square a worker sees whether all workers had its own number x: so it is if and only if these
sums are count * x and count * x * x. Else the numbers would have the mean x, and not the variance 0.

A mark of 32 bits is sent as eight numbers of 4 bits, so that the sums are exact in float32 for thousands of workers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, final

_BITS = range(0, 32, 4)


@final
class Mark(NamedTuple):
    """What a worker tells the others beside its gradients.

    Args:
        place: 32 bits of all that has to be alike: where the worker is, what it has computed, what it trains with.
        mentioned: 32 bits of what need not be alike, but makes a message necessary if it is not.
        leaves: Whether this process will be ended soon.
    """

    place: int
    mentioned: int
    leaves: bool

    def numbers(self) -> list[float]:
        """The numbers to be added up over all workers."""
        return [float(self.leaves), *_parts_of(self.place), *_parts_of(self.mentioned)]


@functools.lru_cache(maxsize=1000)  # most numbers are those of the step before
def _parts_of(mark: int) -> list[int]:
    """The parts of four bits of a number, each followed by its square."""
    parts = [mark >> shift & 15 for shift in _BITS]
    return [number for part in parts for number in (part, part * part)]


NUM_NUMBERS = 1 + 2 * 2 * len(_BITS)


@final
class Verdict(NamedTuple):
    """What the sums of the numbers of all workers tell."""

    all_are_there: bool  # whether all workers have the same `place`
    all_mention_same: bool
    some_leave: bool

    @classmethod
    def of(cls, sums: Sequence[float], own: Mark, count: int) -> Verdict:
        """Reads the sums of the numbers of so many workers, of which one has brought `own`."""
        as_if_alike = [count * number for number in own.numbers()]
        num_of_place = 1 + 2 * len(_BITS)
        return cls(
            all_are_there=sums[1:num_of_place] == as_if_alike[1:num_of_place],
            all_mention_same=sums[num_of_place:] == as_if_alike[num_of_place:],
            some_leave=sums[0] > 0,
        )
