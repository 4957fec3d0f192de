"""Schedulers that are stepped for each micro-batch.

Their schedule counts steps of the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.optimizers.scheduled import (
    OfSchedulers,
    Scheduled,
    rates_of,
)

_ENOUGH_STEPS = 3
_ENOUGH_AT_ZERO = 2  # the last step of a right schedule can have a learning rate of 0


class _Window(NamedTuple):
    """From one step of the optimizer to the next: how often each was called.

    It also says whether the rate was 0 then.
    """

    backwards: int
    schedules: int
    is_zero: bool


@final
@dataclass
class _Seen(Scheduled):
    """What is known of a scheduler.

    Attributes:
        steps_at: Where its optimizer is.
        windows: The steps of its optimizer.
        backwards: The calls of `backward` since the last one.
        schedules: How often it was stepped since then.
        is_first: Whether the optimizer has not made a step since lints know of the
            scheduler.
        in_a_row: How often it was stepped since the last `backward`.
        was_repeated: Whether it was ever stepped more than once there.
    """

    steps_at: Place | None = None
    windows: list[_Window] = field(default_factory=list)
    backwards: int = 0
    schedules: int = 0
    is_first: bool = True
    in_a_row: int = 0
    was_repeated: bool = False


@final
class Schedulers(OfSchedulers[_Seen]):
    """Looks for schedules that are over early, since they count micro-batches.

    A schedule may count micro-batches on purpose. One that leaves the learning rate at
    0 for the last steps does not.
    """

    def __init__(self) -> None:
        super().__init__(_Seen)

    @override
    def stepped_again(self, seen: _Seen, scheduler: Any) -> None:
        seen.place = here()
        seen.schedules += 1
        seen.in_a_row += 1
        seen.was_repeated |= seen.in_a_row > 1

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        for seen in self.all:
            if seen.rank == facts.rank:
                seen.backwards += 1
                seen.in_a_row = 0

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        for seen in self.all:
            if seen.rank != facts.rank or seen.optimizer() is not optimizer:
                continue
            seen.steps_at = here()
            if not seen.is_first:
                seen.windows.append(
                    _Window(seen.backwards, seen.schedules, _is_zero(optimizer))
                )
            seen.backwards, seen.schedules, seen.is_first = 0, 0, False

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(seen) for seen in self.all if _is_over_early(seen)]


def _is_over_early(seen: _Seen) -> bool:
    if seen.was_repeated or not all(
        window.backwards == window.schedules for window in seen.windows
    ):
        return False
    is_often = sum(window.schedules > 1 for window in seen.windows) >= _ENOUGH_STEPS
    return is_often and _steps_at_zero(seen) >= _ENOUGH_AT_ZERO


def _steps_at_zero(seen: _Seen) -> int:
    """How many of the last steps had a learning rate of 0, one after the other."""
    count = 0
    for window in reversed(seen.windows):
        if not window.is_zero:
            break
        count += 1
    return count


def _finding(seen: _Seen) -> Finding | None:
    assert seen.steps_at is not None  # there are windows
    most = max(window.schedules for window in seen.windows)
    return finding(
        "scheduler-counts-backwards",
        f"The scheduler is stepped {most} times ({seen.place}) for each step of its "
        f"optimizer ({seen.steps_at}), once after each `backward`. Its schedule is "
        f"over early: the learning rate was 0 in the last {_steps_at_zero(seen)} of "
        f"{len(seen.windows) + 1} steps.",
        "Call `scheduler.step()` only after `optimizer.step()`, or count micro-batches "
        "in the whole schedule.",
        [seen.place, seen.steps_at],
    )


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing would change, as far as that is known."""
    rates = rates_of(optimizer)
    return rates is not None and not any(rates)
