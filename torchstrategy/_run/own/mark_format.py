"""The numbers by which workers see, without a message of its own, whether they are alike.

Each worker adds a few numbers to what it sends with its gradients. The workers get the sums of these. From the sum of a
number and the sum of its square a worker sees whether all workers had its own number x: so it is if and only if these
sums are count * x and count * x * x. Else the numbers would have the mean x, and not the variance 0.

A mark of 32 bits is sent in parts of a few bits, so small that float32 has the sum of their squares exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import mul
from typing import NamedTuple, final

from torchstrategy._run.own.counted_gradients import NUM_NUMBERS

_BITS_OF_MARK = 32
_EXACT = 1 << 24  # up to here, float32 has each whole number


class Verdict(NamedTuple):
    """What the sums of the numbers of all workers tell."""

    all_are_there: bool  # whether all workers have the same `place`
    all_mention_same: bool
    some_leave: bool
    counts: Sequence[float] = ()  # the sums of the numbers of counts that rode along


_NO_COUNTS = (0.0,) * NUM_NUMBERS
_HEAD = 1 + NUM_NUMBERS  # numbers before the two marks


@final
class MarkFormat:
    """How so many workers write a mark as numbers that are added up.

    Args:
        count: How many workers there are.

    Attributes:
        length: How many numbers a mark has.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        bits = 8 if count * 255**2 < _EXACT else 4
        self._num_parts = 2 * _BITS_OF_MARK // bits  # parts and squares of one of the two numbers
        self._parts_of_byte = [_parts_of(byte, bits) for byte in range(256)]
        self.length = _HEAD + 2 * self._num_parts

    def numbers(self, place: int, mentioned: int, leaves: bool, counts: Sequence[float] = _NO_COUNTS) -> list[float]:
        """What a worker tells the others, as numbers that are added up over all workers.

        Args:
            place: 32 bits of all that has to be alike: where the worker is, what it has computed, what it trains with.
            mentioned: 32 bits of what need not be alike, but makes a message necessary if it is not.
            leaves: Whether this process will be ended soon.
            counts: Numbers that are added up, and are no part of the marks.
        """
        both = (place | mentioned << _BITS_OF_MARK).to_bytes(2 * _BITS_OF_MARK // 8, "little")
        return [float(leaves), *counts, *chain.from_iterable(map(self._parts_of_byte.__getitem__, both))]

    def read(self, sums: Sequence[float], own: Sequence[float]) -> Verdict:
        """Reads the sums of the numbers of all workers, of which this one has brought `own`."""
        if_alike = list(map(mul, own, repeat(self._count)))
        end_of_place = _HEAD + self._num_parts
        return Verdict(
            all_are_there=sums[_HEAD:end_of_place] == if_alike[_HEAD:end_of_place],
            all_mention_same=sums[end_of_place:] == if_alike[end_of_place:],
            some_leave=sums[0] > 0,
            counts=sums[1:_HEAD],
        )


def _parts_of(byte: int, bits: int) -> list[float]:
    """The parts of a byte that have so many bits, each followed by its square; the lowest first."""
    parts: list[float] = []
    for shift in range(0, 8, bits):
        part = byte >> shift & (1 << bits) - 1
        parts += (part, part * part)
    return parts
