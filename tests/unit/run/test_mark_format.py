"""Marks: what a worker learns of all others from sums of numbers."""

from collections.abc import Callable, Sequence

import pytest
import torch

from torchstrategy._run.own.mark_format import Mark, MarkFormat, Verdict

DTYPES = [torch.float32, torch.float64]
# From 259 workers on, float32 has not the sums of squares of a whole byte.
COUNTS = [2, 3, 255, 300, 4000]


@pytest.fixture(params=DTYPES, ids=str)
def read_all(request: pytest.FixtureRequest) -> Callable[[Sequence[Mark]], Verdict]:
    """What the first of some workers reads once the numbers of all are added up.

    Gloo adds them up so: one by one.
    """

    def read(marks: Sequence[Mark]) -> Verdict:
        marks_of = MarkFormat(len(marks), request.param)
        total = torch.zeros(marks_of.length, dtype=request.param)
        for mark in marks:
            total += torch.frombuffer(
                bytearray(marks_of.write(mark)), dtype=request.param
            )
        return marks_of.read(total.numpy().tobytes(), marks[0])

    return read


@pytest.mark.parametrize("count", COUNTS)
def test_workers_that_are_alike_see_it(
    read_all: Callable[[Sequence[Mark]], Verdict], count: int
) -> None:
    for bits in (0, 1, 0xFFFFFFFF, 0x9E3779B9):
        verdict = read_all([Mark(bits, bits ^ 0x5A5A5A5A, leaves=False)] * count)
        assert (
            verdict.all_are_there
            and verdict.all_mention_same
            and not verdict.some_leave
        )
        assert list(verdict.counts) == [0.0, 0.0]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bit", [0, 3, 4, 7, 8, 21, 31])
def test_one_bit_of_one_worker_is_seen(
    read_all: Callable[[Sequence[Mark]], Verdict], count: int, bit: int
) -> None:
    alike = [Mark(0x12345678, 0x9ABCDEF0, leaves=False)] * (count - 1)
    elsewhere = read_all(
        [*alike, Mark(0x12345678 ^ 1 << bit, 0x9ABCDEF0, leaves=False)]
    )
    assert not elsewhere.all_are_there and elsewhere.all_mention_same
    other = read_all([*alike, Mark(0x12345678, 0x9ABCDEF0 ^ 1 << bit, leaves=False)])
    assert other.all_are_there and not other.all_mention_same


def test_two_that_differ_by_as_much_to_both_sides_are_seen(
    read_all: Callable[[Sequence[Mark]], Verdict],
) -> None:
    """The mean is that of the first worker; the squares tell."""
    verdict = read_all([Mark(place, 7, leaves=False) for place in (16, 15, 17)])
    assert not verdict.all_are_there and verdict.all_mention_same


def test_one_that_leaves_and_counts_are_told(
    read_all: Callable[[Sequence[Mark]], Verdict],
) -> None:
    leaving = read_all([Mark(3, 4, leaves=False), Mark(3, 4, leaves=True)])
    assert leaving.some_leave and leaving.all_are_there and leaving.all_mention_same
    counted = read_all(
        [
            Mark(3, 4, leaves=False, counts=[2.0, 5.0]),
            Mark(3, 4, leaves=False, counts=[0.0, 4095.0]),
        ]
    )
    assert list(counted.counts) == [2.0, 4100.0]
    assert counted.all_are_there and not counted.some_leave
