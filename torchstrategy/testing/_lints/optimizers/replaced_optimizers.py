"""Schedulers whose optimizer makes no steps, since another one has taken its place."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute
from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.optimizers.scheduled import (
    OfSchedulers,
    Scheduled,
    rates_of,
)

# Steps of the scheduler: one or two more at the end of a schedule change nothing.
_ENOUGH = 3


@final
@dataclass
class _Other:
    """An optimizer that makes steps with the parameters of a scheduler's optimizer.

    Attributes:
        rates: Its learning rates, at its first such step.
        steps_at: Where its last one was made.
        steps: How many it has made.
    """

    rates: list[float] | None
    steps_at: Place
    steps: int = 0


@final
@dataclass
class _Seen(Scheduled):
    """What is known of a scheduler.

    Attributes:
        rates: The learning rates of its optimizer when another one made the first step
            in its place.
        last_rates: The last ones.
        steps: How many steps its optimizer has made.
        schedules: How often it was stepped since then, each time after steps of another
            optimizer.
        others: These optimizers, and all others that are asked for; None: one with
            other parameters.
        has_schedule: Whether the learning rates of one of them change, or it has a
            scheduler of its own.
        other: That which has made the last step.
        is_awaited: Whether one of them has made a step since the scheduler was stepped.
        is_over: Whether it was seen that its optimizer is used, too.
    """

    rates: list[float] | None = None
    last_rates: list[float] | None = None
    steps: int = 0
    schedules: int = 0
    others: Objects[torch.optim.Optimizer, _Other | None] = field(
        default_factory=Objects
    )
    has_schedule: bool = False
    other: _Other | None = None
    is_awaited: bool = False
    is_over: bool = False


@final
class ReplacedOptimizers(OfSchedulers[_Seen]):
    """Looks for schedulers that are stepped while only another optimizer steps.

    The learning rate of this one stays as it is.

    The learning rate of a wrapper that shares its groups with an optimizer follows the
    schedule. Optimizers that take turns are left alone.
    """

    def __init__(self) -> None:
        super().__init__(_Seen)

    @override
    def stepped_again(self, seen: _Seen, scheduler: Any) -> None:
        if seen.is_awaited and not seen.is_over:
            seen.is_awaited = False
            seen.schedules += 1
            seen.place = here()
            own = seen.optimizer()
            seen.last_rates = None if own is None else rates_of(own)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        for seen in self.all:
            own = seen.optimizer()
            if seen.rank != facts.rank or seen.is_over or own is None:
                continue
            if own is optimizer:
                seen.steps += 1
                # They take turns.
                seen.is_over = seen.schedules > 0 or seen.other is not None
            else:
                self._steps_instead(seen, own, optimizer)

    @override
    def steps_within(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        for seen in self.all:
            if seen.rank == facts.rank and seen.optimizer() is optimizer:
                seen.is_over = True

    @override
    def findings(self) -> list[Finding | None]:
        found = {
            seen.place: _finding(seen) for seen in self.all if _is_of_another(seen)
        }
        return list(found.values())

    def _steps_instead(
        self, seen: _Seen, own: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
    ) -> None:
        if optimizer not in seen.others:
            is_other = _has_parameters_of(optimizer, own)
            seen.others[optimizer] = (
                _Other(rates_of(optimizer), here()) if is_other else None
            )
        other = seen.others[optimizer]
        if other is None:
            return
        if seen.other is None:
            seen.rates = rates_of(own)
        seen.other = other
        seen.is_awaited = True
        other.steps += 1
        other.steps_at = here()
        is_changed = other.rates is None or rates_of(optimizer) != other.rates
        seen.has_schedule |= is_changed or (
            other.steps == _ENOUGH and _has_scheduler(optimizer)
        )


def _is_of_another(seen: _Seen) -> bool:
    if (
        seen.is_over
        or seen.has_schedule
        or seen.other is None
        or seen.schedules < _ENOUGH
    ):
        return False
    return (
        seen.rates is not None
        and seen.last_rates is not None
        and seen.rates != seen.last_rates
    )


def _finding(seen: _Seen) -> Finding | None:
    other = seen.other
    assert (
        other is not None
        and other.rates is not None
        and seen.rates is not None
        and seen.last_rates is not None
    )
    made = (
        f"has made {seen.steps} steps and is no longer used"
        if seen.steps
        else "has made no step"
    )
    return finding(
        "scheduler-of-other-optimizer",
        f"The scheduler that is stepped at {seen.place} changes the learning rate of "
        f"an optimizer that {made}, from {max(seen.rates):.3g} to "
        f"{max(seen.last_rates):.3g}. Another optimizer of the same parameters makes "
        f"the steps ({other.steps_at}), with a learning rate of {max(other.rates):.3g} "
        f"in all of its {other.steps} steps.",
        "Make the scheduler after the optimizer that it is for, and again wherever you "
        "replace the optimizer.",
        [seen.place, other.steps_at],
    )


def _has_parameters_of(
    optimizer: torch.optim.Optimizer, own: torch.optim.Optimizer
) -> bool:
    """Whether an optimizer has most parameters of another one."""
    parameters = {id(parameter) for parameter in parameters_of(optimizer)}
    owned = [id(parameter) in parameters for parameter in parameters_of(own)]
    return 2 * sum(owned) > len(owned)


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is a scheduler for an optimizer.

    It may not have changed anything yet.
    """
    schedulers = [
        thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)
    ]
    return any(
        attribute(scheduler, "optimizer") is optimizer for scheduler in schedulers
    )
