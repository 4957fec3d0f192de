"""Gradients that count by a number which travels with them.

The sum of the gradients is divided by the sum of these numbers.

Each worker multiplies its gradients by its count, divided by the sum of the counts of
all workers in an earlier step. Where all counts are as they were, this is the weight
that it has, and the sums are right as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch

# float32 has each multiple of it, up to 2 ** 36, as a whole number of its own.
_STEP: Final = 4096.0

# What is sent in place of the mark of what was read, which mostly differs from it.
_UNFORESEEN: Final = 0x5A17

NUM_NUMBERS: Final = 2  # so many numbers tell a count in the memory of the CPU


class Settled(NamedTuple):
    """What follows of the counts of all workers."""

    factor: float | torch.Tensor  # what the sums of gradients are multiplied by
    # How much this worker counts; None: as it has rows.
    weight: float | torch.Tensor | None


@final
class CountedGradients:
    """How much the gradients of a worker count in one backward.

    Args:
        mark: 32 bits of what was read of the loss. The counts matter only if all
            workers have the same.
        count: What the loss was divided by. None: nothing, and gradients count by rows.
        unit: The sum of the counts of all workers in an earlier step.
        is_zero: Whether the gradient is zero if no worker counts anything, as where a
            divisor is clamped. Else NaN. The host asks the workers then, if it knows.

    Attributes:
        mark: As given.
        weight: What gradients are multiplied by before they are sent. None: they count
            by rows.
        numbers: The count as numbers that are added up over all workers, exactly so far
            as float32 can.
        total: The count in the memory of an accelerator, of which the host does not
            wait for the sum. None: `numbers` tell it.
    """

    def __init__(
        self,
        mark: int,
        count: float | torch.Tensor | None = None,
        unit: float = 1.0,
        is_zero: bool = False,
    ) -> None:
        self.mark, self._count, self._unit, self._is_zero = mark, count, unit, is_zero
        self.weight = None if count is None else count / unit
        self.total: torch.Tensor | None = None
        self.numbers = [0.0] * NUM_NUMBERS
        if isinstance(count, torch.Tensor):
            self.total = count.clone()
        elif count is not None:
            high = count // _STEP
            self.numbers = [high, count - high * _STEP]

    @classmethod
    def unforeseen(cls, device: torch.device | None) -> CountedGradients:
        """Nothing that fits what the others have.

        `device`: where their counts travel, if not with the mark.
        """
        count = (
            None
            if device is None
            else torch.zeros((), dtype=torch.float64, device=device)
        )
        return cls(_UNFORESEEN, count)

    def settle(self, sums: Sequence[float]) -> Settled | None:
        """What follows of the sums of `numbers`, or of `total`, which is the sum then.

        None: no worker counts.
        """
        if self._count is None:
            return Settled(1.0, None)
        if self.total is not None:
            total = (
                torch.where(self.total == 0, torch.inf, self.total)
                if self._is_zero
                else self.total
            )
            return Settled(self._unit / total, self._count / total)
        assert not isinstance(self._count, torch.Tensor)
        high, low = sums
        sum_of_all = high * _STEP + low
        return (
            Settled(self._unit / sum_of_all, self._count / sum_of_all)
            if sum_of_all > 0
            else None
        )
