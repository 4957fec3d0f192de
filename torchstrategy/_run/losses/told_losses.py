"""What workers tell one another of their losses where a backward begins.

A message has eight bytes that stand for what is the same in each step as a rule: of
which terms the loss is made. The numbers of the step follow: counts, factors, and the
loss itself. Where some worker does not know what the bytes of another one stand for,
all tell it in one more message.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch

from torchstrategy._base.marks import digest
from torchstrategy._group.workers import Workers
from torchstrategy._run.losses.graph_nodes import is_scalar
from torchstrategy._run.losses.loss_terms import (
    DIVISOR,
    NUMBER,
    SELECTION,
    TARGETS,
    Scale,
)
from torchstrategy._run.losses.loss_weights import (
    Fact,
    LossReading,
    counts_alone,
    number_of,
)

_MOST_KNOWN = 256  # are kept: a step may make another loss each time
# Which replica, how many numbers, and the digest of what the loss is made of.
_HEAD = struct.Struct("<HH8s")

# When the workers compare what their losses were divided by.
BEFORE: Final = "before"  # before backward begins
WITH: Final = "with"  # not at all: counts travel with the gradients
NEVER: Final = "never"  # not at all: there is no count


@final
class ToldLosses:
    """Exchanges what the replicas of all workers have read of their losses.

    Args:
        workers: The processes that train together.
        num_local: How many replicas each of them has.
    """

    def __init__(self, workers: Workers, num_local: int) -> None:
        self._workers, self._num_local = workers, num_local
        self._known: dict[bytes, list[Any]] = {}  # the same in all workers

    def of_all(
        self, own: Mapping[int, LossReading], name: str
    ) -> dict[int, LossReading]:
        """What all replicas have read.

        Args:
            own: By the number in its worker, what each replica of this worker has read
                that takes part in the run.
            name: The name of the exchange.

        Returns:
            The readings by the number of the replica among all, with numbers in the
            place of tensors.
        """
        made_of = {r: _made_of(reading) for r, reading in own.items()}
        digests = {r: digest(json.dumps(one).encode()) for r, one in made_of.items()}
        told = b"".join(
            _HEAD.pack(r, len(numbers), digests[r])
            + struct.pack(f"<{len(numbers)}d", *numbers)
            for r, numbers in ((r, _numbers(reading)) for r, reading in own.items())
        )
        rows = [
            (worker * self._num_local + r, mark, numbers)
            for worker, data in enumerate(self._workers.all_gather_bytes(told, name))
            for r, mark, numbers in _unpacked(data)
        ]
        if any(mark not in self._known for _, mark, _ in rows):
            if len(self._known) >= _MOST_KNOWN:  # in all workers at once
                self._known.clear()
            for of_worker in self._workers.all_gather_object(
                list(made_of.values()), name
            ):
                self._known.update(
                    {digest(json.dumps(one).encode()): one for one in of_worker}
                )
        return {
            r: _reading(self._known[mark], list(numbers)) for r, mark, numbers in rows
        }


def when_to_compare(reading: LossReading, is_even: bool, rows: float | None) -> str:
    """When workers have to compare their losses, if all have read the same.

    Their counts may differ, and do not matter here.

    Counts that travel with the gradients have to be numbers from 0 on.

    Args:
        reading: What was read.
        is_even: Whether all workers count the same by their rows.
        rows: How many rows each has then; None: nobody knows.
    """
    facts = reading.facts
    if all(fact.source not in _COUNTED for fact in facts):
        return NEVER
    (first, *others) = facts
    if others or not is_even:
        return BEFORE
    if first.source == NUMBER:
        # It is compared beside the gradients: where all have it, it counts nothing.
        return NEVER
    return BEFORE if first.has_awaited or not counts_alone(first, rows) else WITH


def mark_of(reading: LossReading) -> int:
    """32 bits of all that was read, but for what is compared in another way.

    Counts that are no Python numbers are compared in another way.
    """
    if all(fact.source not in _COUNTED for fact in reading.facts):
        return 0  # rows count, whatever it is
    told = []
    for fact in reading.facts:
        count = fact.counted if fact.source == NUMBER else None
        # Those for which the host would have to wait are compared before backward.
        scales = (
            None
            if fact.has_awaited
            else [number_of(scale.tensor) for scale in fact.scales]
        )
        told.append((_made_of_fact(fact), count, fact.factor, fact.divisors, scales))
    return zlib.crc32(repr(told).encode())


def count_on_device(reading: LossReading) -> torch.Tensor:
    """What the only term was divided by, in float64, on its own device.

    The host does not wait for this number.
    """
    (fact,) = reading.facts
    count = fact.counted
    assert isinstance(count, torch.Tensor)
    assert reading.value is not None
    if fact.source == DIVISOR:  # what `clamp(min=1)` makes of an empty mask
        count = torch.where((count == 1) & (reading.value.reshape(()) == 0), 0, count)
    return count.reshape(()).double()


def are_alike(readings: Sequence[LossReading]) -> bool:
    """Whether replicas read the same, but for counts that travel with gradients."""
    return len(set(map(mark_of, readings))) == 1


_COUNTED = (TARGETS, DIVISOR, SELECTION, NUMBER)


def _made_of_fact(fact: Fact) -> list[Any]:
    return [
        *(fact.source, fact.name, fact.counted is not None, len(fact.divisors)),
        [[scale.divides, is_scalar(scale.tensor)] for scale in fact.scales],
        *(fact.is_learned, fact.is_added, fact.is_hooked, fact.is_rounded, fact.likes),
        *(fact.is_awaited, fact.has_awaited),
    ]


def _made_of(reading: LossReading) -> list[Any]:
    """What is the same in each step as a rule, in lists as JSON has them."""
    return [_made_of_fact(fact) for fact in reading.facts]


def _numbers(reading: LossReading) -> list[float]:
    """What is another one in each step.

    To read it from an accelerator, the host waits for it.
    """
    numbers = [number_of(reading.value)]
    for fact in reading.facts:
        if fact.counted is not None:
            numbers.append(number_of(fact.counted))
        numbers += (
            fact.factor,
            *fact.divisors,
            *(number_of(scale.tensor) for scale in fact.scales),
        )
    return numbers


def _unpacked(data: bytes) -> list[tuple[int, bytes, tuple[float, ...]]]:
    found, place = [], 0
    while place < len(data):
        r, count, mark = _HEAD.unpack_from(data, place)
        numbers = struct.unpack_from(f"<{count}d", data, place + _HEAD.size)
        place += _HEAD.size + 8 * count
        found.append((r, mark, numbers))
    return found


def _reading(made_of: list[Any], numbers: list[float]) -> LossReading:
    """What a replica has read, of what its worker has told."""
    value, *rest = numbers
    left = iter(rest)
    facts = []
    for source, name, has_count, num_divisors, scales, *flags in made_of:
        is_learned, is_added, is_hooked, is_rounded, likes, is_awaited, has_awaited = (
            flags
        )
        fact = Fact(
            source=source,
            name=name,
            counted=next(left) if has_count else None,
            factor=next(left),
            divisors=tuple([next(left) for _ in range(num_divisors)]),
            scales=tuple([_scale(next(left), *kind) for kind in scales]),
            is_learned=is_learned,
            is_added=is_added,
            is_hooked=is_hooked,
            is_rounded=is_rounded,
            likes=likes,
            is_awaited=is_awaited,
            has_awaited=has_awaited,
        )
        facts.append(fact)
    return LossReading(
        tuple(facts), torch.tensor(value, dtype=torch.float64, device="cpu")
    )


def _scale(number: float, divides: bool, is_number: bool) -> Scale:
    tensor = torch.tensor(number, dtype=torch.float64, device="cpu")
    return Scale(tensor if is_number else tensor.view(1), divides)
