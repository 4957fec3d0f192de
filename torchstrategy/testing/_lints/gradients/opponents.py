"""Gradients that are left from the step of another optimizer.

They work against those they are added to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Backward, Facts, parameters_of
from torchstrategy.testing._lints.evidence.fingerprints import (
    has_ordinary_numbers,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import held_here, without_modes
from torchstrategy.testing._simulation.program import unwatched

_ENOUGH_STEPS = 4
# The cosine of the angle: gradients of other losses are near 0, those of GANs below
# -0.8.
_OPPOSED = -0.7
_PARAMETERS, _NUMBERS = 32, 256  # how many are compared, and how many numbers of each
_MOST_CALLS = 1000  # without a step
_MOST_SAMPLES = 50  # of an optimizer that makes no such step

# Some numbers of gradients, by the position of the parameter in its optimizer.
Sample = dict[int, torch.Tensor]


@final
@dataclass
class _Left:
    """Gradients of an optimizer's parameters after another optimizer has made a step.

    Attributes:
        calls: The `backward` calls that they come from.
        step_at: Where the other optimizer has made its step.
        before: Some of their numbers.
        after: The same after the next `backward` calls have added to them; None before
            these.
        added: These calls.
    """

    calls: list[Backward]
    step_at: Place
    before: Sample
    after: Sample | None = None
    added: list[Backward] = field(default_factory=list)


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        steps: How many steps, from its first one on, it has made with gradients that
            work against each other.
        samples: How often its gradients were looked at.
        is_over: Whether it has made another step, or was found.
    """

    steps: int = 0
    samples: int = 0
    is_over: bool = False


class _Found(NamedTuple):
    left: _Left
    steps_at: Place
    cosine: float


@final
class Opponents(Lint):
    """Looks for the gradients that a generator gets from the loss of its discriminator.

    A program may add the gradients of several losses, and make steps of other
    optimizers in between. No program means to add gradients that are opposed in each
    step from the first one on.
    """

    def __init__(self) -> None:
        # By rank, since the last step.
        self._calls: dict[int, list[Backward]] = defaultdict(list)
        self._left: dict[int, Objects[torch.optim.Optimizer, _Left]] = defaultdict(
            Objects
        )
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._found: dict[Place, _Found] = {}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        if facts.stepping is not None:
            return
        for optimizer, left in list(self._left[facts.rank].items()):
            if left.after is None and not _are_equal(left.before, _sample(optimizer)):
                # They were zeroed, as they should be.
                del self._left[facts.rank][optimizer]

    @override
    def went_back(self, facts: Facts) -> None:
        if (
            facts.stepping is not None
            or len(facts.optimizers) < 2
            or not facts.backwards
        ):
            return
        if len(self._calls[facts.rank]) >= _MOST_CALLS:
            return
        call = facts.backwards[-1]
        self._calls[facts.rank].append(call)
        for optimizer, left in list(self._left[facts.rank].items()):
            left.after = _sample(optimizer)
            left.added.append(call)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if len(facts.optimizers) < 2:
            return
        self._judge(optimizer, self._left[facts.rank].pop(optimizer, None))
        calls = self._calls[facts.rank]
        changed = set().union(*(call.changed for call in calls))
        if not any(id(parameter) in changed for parameter in parameters_of(optimizer)):
            return
        for other in list(facts.optimizers):
            seen = self._seen.setdefault(other, _Seen())
            is_other = other is not optimizer and any(
                id(parameter) in changed for parameter in parameters_of(other)
            )
            if not is_other or seen.is_over:
                continue
            seen.samples += 1
            seen.is_over = seen.samples > _MOST_SAMPLES
            self._left[facts.rank][other] = _Left(list(calls), here(), _sample(other))

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._calls[facts.rank].clear()

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(found) for found in self._found.values()]

    def _judge(self, optimizer: torch.optim.Optimizer, left: _Left | None) -> None:
        """An optimizer is going to make a step."""
        seen = self._seen.setdefault(optimizer, _Seen())
        if seen.is_over:
            return
        cosine = _cosine(left)
        if left is None or cosine is None or cosine > _OPPOSED:
            seen.is_over = True
            return
        seen.steps += 1
        if seen.steps == _ENOUGH_STEPS:
            seen.is_over = True
            place = here()
            self._found.setdefault(place, _Found(left, place, cosine))


def _sample(optimizer: torch.optim.Optimizer) -> Sample:
    found = {}
    for position, parameter in enumerate(parameters_of(optimizer)[:_PARAMETERS]):
        gradient = held_here(parameter.grad)
        if gradient is not None and has_ordinary_numbers(gradient):
            there = numbers_of(gradient)
            with torch.no_grad(), unwatched(), without_modes():
                found[position] = there.flatten()[:_NUMBERS].double().clone()
    return found


def _are_equal(before: Sample, after: Sample) -> bool:
    with unwatched(), without_modes():
        return bool(before) and all(
            position in after and torch.equal(numbers, after[position])
            for position, numbers in before.items()
        )


def _cosine(left: _Left | None) -> float | None:
    """Of the angle between what was left and what was added.

    It is None if it is not known, or one loop made both.
    """
    if (
        left is None
        or left.after is None
        or not left.before.keys() <= left.after.keys()
    ):
        return None
    if any(
        left.after[position].shape != numbers.shape
        for position, numbers in left.before.items()
    ):
        return None  # the program has made other parameters of them
    if {call.way for call in left.calls} & {call.way for call in left.added}:
        return None
    with unwatched(), without_modes():
        before = torch.cat(list(left.before.values()))
        added = torch.cat([left.after[position] for position in left.before]) - before
        size = float(before.norm() * added.norm())
        return float(before @ added) / size if size > 0 else None


def _finding(found: _Found) -> Finding | None:
    left, added = found.left.calls[-1].way[0], found.left.added[-1].way[0]
    return finding(
        "gradient-of-other-step",
        f"`backward` at {left} gives gradients to the parameters of two optimizers. "
        f"One makes its step ({found.left.step_at}); the gradients of the other one "
        f"stay, and `backward` at {added} adds to them before its step "
        f"({found.steps_at}). The two work against each other in each of the first "
        f"{_ENOUGH_STEPS} steps: the cosine of the angle between them is "
        f"{found.cosine:.2f}.",
        "Detach what the model of the other optimizer has made, as in "
        "`discriminator(fake.detach())`, or call `zero_grad()` of an optimizer right "
        "before its own `backward`.",
        [left, found.left.step_at, added, found.steps_at],
    )
