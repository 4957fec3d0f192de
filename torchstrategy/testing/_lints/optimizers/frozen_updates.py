"""Parameters that are frozen while they train, and that their optimizer changes.

It goes on changing them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    is_zero,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.modules import names_of
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_ENOUGH = 2  # steps, one after the other
_MOST = 64  # parameters that are compared


class _Found(NamedTuple):
    steps_at: Place
    names: list[str]
    since: int


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        steps: How many steps it has made.
        trained: The parameters that required a gradient at one of them, and had it.
        before: What frozen parameters with a gradient of zeros were before the step
            that it is making.
        changed: How many steps in a row have changed some of them.
        is_over: Whether that has been found.
    """

    steps: int = 0
    trained: Objects[torch.Tensor, None] = field(default_factory=Objects)
    before: Objects[torch.Tensor, torch.Tensor] = field(default_factory=Objects)
    changed: int = 0
    is_over: bool = False


@final
class FrozenUpdates(Lint):
    """Looks for steps that change parameters without `requires_grad`.

    Their gradient is zero, and they were trained.

    Momentum, the moments of Adam and the decay of weights change such a parameter. One
    whose gradient is None is left as it is, by all optimizers of torch.
    """

    def __init__(self) -> None:
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._found: dict[Place, _Found] = {}

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.setdefault(optimizer, _Seen())
        seen.steps += 1
        seen.before = Objects()
        if seen.is_over:
            return
        changed = set().union(*(call.changed for call in facts.backwards))
        for parameter in parameters_of(optimizer):
            if parameter.grad is None:
                continue
            may_be_frozen = (
                parameter in seen.trained
                and id(parameter) not in changed
                and len(seen.before) < _MOST
            )
            if parameter.requires_grad:
                seen.trained[parameter] = None
            elif may_be_frozen and can_be_read(parameter) and is_zero(parameter.grad):
                seen.before[parameter] = _copy(parameter)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.get(optimizer)
        if seen is None or seen.is_over:
            return
        changed = [
            parameter
            for parameter, before in seen.before.items()
            if _differs(parameter, before)
        ]
        seen.changed = seen.changed + 1 if changed else 0
        seen.before = Objects()
        if seen.changed == _ENOUGH:
            seen.is_over = True
            place = here()
            self._found.setdefault(
                place, _Found(place, names_of(changed), seen.steps - _ENOUGH + 1)
            )

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "frozen-but-updated",
                f"The optimizer changes {some(one.names)} in its steps "
                f"({one.steps_at}), since step {one.since}, though `requires_grad` is "
                "False now. They were trained before, and their gradients are zero and "
                "not None: momentum and decay of weights go on.",
                "Set their gradients to None when you freeze them, as "
                "`optimizer.zero_grad(set_to_none=True)` does, or make an optimizer "
                "without them.",
                [one.steps_at],
            )
            for one in self._found.values()
        ]


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    numbers = numbers_of(parameter)
    with torch.no_grad(), unwatched(), without_modes():
        return numbers.clone()


def _differs(parameter: torch.Tensor, before: torch.Tensor) -> bool:
    if (
        not can_be_read(parameter)
        or parameter.shape != before.shape
        or parameter.dtype != before.dtype
    ):
        return False
    now = numbers_of(parameter)
    with torch.no_grad(), unwatched(), without_modes():
        return bool((now != before).any())  # `equal` knows less dtypes
