"""The numbers by which workers see, without a message, whether they are alike.

Each worker adds a few numbers to what it sends with its gradients. The workers get the
sums of these. From the sum of a number and the sum of its square a worker sees whether
all workers had its own number x: so it is if and only if these sums are count * x and
count * x * x. Else the numbers would have the mean x, and not the variance 0.

A mark of 32 bits is sent in parts of a few bits, so small that float32 has the sum of
their squares exactly.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from torchstrategy._run.own.counted_gradients import NUM_NUMBERS

_BITS_OF_MARK = 32
_NUM_BYTES = 2 * _BITS_OF_MARK // 8  # of the two marks
_EXACT = 1 << 24  # up to here, float32 has each whole number
_NO_COUNTS = (0.0,) * NUM_NUMBERS
_HEAD = 1 + NUM_NUMBERS  # numbers before those of the two marks
# The dtypes in which the numbers of a mark are exact, as `struct` names them.
_FORMATS = {torch.float32: "f", torch.float64: "d"}
SUMMED = frozenset(_FORMATS)


class Mark(NamedTuple):
    """What a worker tells the others, beside its gradients."""

    # 32 bits of all that has to be alike: where it is, what it has computed, what it
    # trains with.
    place: int
    # 32 bits of what need not be alike, but makes a message necessary if it is not.
    mentioned: int
    leaves: bool  # whether this process will be ended soon
    # Numbers that are added up, and are compared with nothing.
    counts: Sequence[float] = _NO_COUNTS

    def parts(self) -> bytes:
        """What is compared."""
        return (self.place | self.mentioned << _BITS_OF_MARK).to_bytes(
            _NUM_BYTES, "little"
        )


class Verdict(NamedTuple):
    """What the sums of the numbers of all workers tell."""

    all_are_there: bool  # whether all workers have the same `place`
    all_mention_same: bool
    some_leave: bool
    counts: Sequence[float] = ()  # the sums of the numbers of counts that rode along


_ALL_ALIKE = Verdict(
    all_are_there=True, all_mention_same=True, some_leave=False, counts=_NO_COUNTS
)


@final
class MarkFormat:
    """How so many workers write a mark as numbers of a dtype that are added up.

    Args:
        count: How many workers there are.
        dtype: `torch.float32` or `torch.float64`.

    Attributes:
        length: How many numbers a mark has.
        num_bytes: How many bytes these take.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        bits = 8 if count * 255**2 < _EXACT else 4
        parts_of_byte = [_parts_of(byte, bits) for byte in range(256)]
        num_of_parts = len(parts_of_byte[0])
        self.length = _HEAD + _NUM_BYTES * num_of_parts
        self._head = struct.Struct(f"{_HEAD}{_FORMATS[dtype]}")
        self.num_bytes = struct.calcsize(f"{self.length}{_FORMATS[dtype]}")
        # Each backward writes and reads a mark, so what stands for a byte of it is made
        # once.
        pack_parts = struct.Struct(f"{num_of_parts}{_FORMATS[dtype]}").pack
        self._written = [pack_parts(*parts) for parts in parts_of_byte]
        self._if_alike = [
            pack_parts(*(count * part for part in parts)) for parts in parts_of_byte
        ]
        self._head_of_most = bytes(self._head.size)

    def write(self, mark: Mark) -> bytes:
        """A mark as the bytes of its numbers."""
        head = (
            self._head.pack(mark.leaves, *mark.counts)
            if mark.leaves or any(mark.counts)
            else self._head_of_most
        )
        return head + b"".join(map(self._written.__getitem__, mark.parts()))

    def read(self, sums: bytes, own: Mark) -> Verdict:
        """Reads the sums of all workers' numbers; this worker has brought `own`."""
        if_alike = b"".join(map(self._if_alike.__getitem__, own.parts()))
        if sums == self._head_of_most + if_alike:  # as mostly
            return _ALL_ALIKE
        leave, *counts = self._head.unpack_from(sums)
        compared = sums[self._head.size :]
        half = len(compared) // 2
        return Verdict(
            all_are_there=compared[:half] == if_alike[:half],
            all_mention_same=compared[half:] == if_alike[half:],
            some_leave=leave > 0,
            counts=counts,
        )


@functools.cache
def mark_format(count: int, dtype: torch.dtype) -> MarkFormat:
    """How the workers write a mark as numbers of a dtype.

    The format is the same for all groups of as many workers.
    """
    return MarkFormat(count, dtype)


def _parts_of(byte: int, bits: int) -> list[float]:
    """The parts of a byte, each of so many bits, and each followed by its square.

    The lowest part comes first.
    """
    parts: list[float] = []
    for shift in range(0, 8, bits):
        part = byte >> shift & (1 << bits) - 1
        parts += (part, part * part)
    return parts
