"""Steps that are made while gradients of sharded parameters wait to be reduced."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy._base.torch_internals import sharding_groups
from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.modules import living_modules
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import part_of

_ENOUGH_STEPS = 2  # a batch at the end of an epoch can be left out on purpose


class _Found(NamedTuple):
    backward_at: Place
    steps_at: Place
    waiting: int
    parameters: int


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        models: The modules of `fully_shard` that have its parameters; None before
            anybody has looked for them.
        steps: How many steps in a row it has made while gradients were waiting.
    """

    models: list[weakref.ref[nn.Module]] | None = None
    steps: int = 0


@final
class Unreduced(Lint):
    """Looks into modules of `fully_shard` before a step with several `backward` calls.

    It also does before one with no gradients.

    After `set_requires_gradient_sync(False)` they keep whole gradients for a later
    `backward`. No optimizer sees them.
    """

    def __init__(self) -> None:
        self._backwards: dict[int, list[Place]] = defaultdict(list)
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._found: dict[Place, _Found] = {}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        # The first and the last one are enough.
        self._backwards[facts.rank][1:] = [here()]

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        backwards, parameters = self._backwards[facts.rank], parameters_of(optimizer)
        is_ordinary = len(backwards) == 1 and any(
            parameter.grad is not None for parameter in parameters
        )
        if (
            not backwards
            or is_ordinary
            or not any(part_of(parameter) is not None for parameter in parameters)
        ):
            return
        seen = self._seen.setdefault(optimizer, _Seen())
        if seen.models is None:
            seen.models = models_with(parameters)
        waiting = _waiting_in(seen.models, parameters)
        seen.steps = seen.steps + 1 if waiting else 0
        if seen.steps == _ENOUGH_STEPS:
            place = here()
            self._found.setdefault(
                place, _Found(backwards[-1], place, waiting, len(parameters))
            )

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._backwards[facts.rank].clear()

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "step-before-reduction",
                f"The optimizer makes a step ({one.steps_at}) while whole gradients of "
                f"{one.waiting} of its {one.parameters} parameters wait to be reduced: "
                f"the last `backward` before it ({one.backward_at}) came after "
                "`set_requires_gradient_sync(False)`. They count in a later step, or "
                "in none.",
                "Call `model.set_requires_gradient_sync(True)` before the last "
                "micro-batch of each step, and with False before the others.",
                [one.backward_at, one.steps_at],
            )
            for one in self._found.values()
        ]


def models_with(parameters: Sequence[torch.Tensor]) -> list[weakref.ref[nn.Module]]:
    """The modules of `fully_shard` that have some of these parameters."""
    owned, found = {id(parameter) for parameter in parameters}, []
    for module in living_modules():
        if any(
            id(one.sharded_param) in owned
            for group in sharding_groups(module)
            for one in group.fsdp_params
        ):
            found.append(weakref.ref(module))
    return found


def _waiting_in(
    models: Sequence[weakref.ref[nn.Module]], parameters: Sequence[torch.Tensor]
) -> int:
    """How many of these parameters have a gradient that waits."""
    owned, waiting = {id(parameter) for parameter in parameters}, set()
    for model in models:
        module = model()
        for group in () if module is None else sharding_groups(module):
            waiting |= {
                id(one.sharded_param) for one in group.fsdp_params if _is_waiting(one)
            }
    return len(owned & waiting)


def _is_waiting(parameter: Any) -> bool:
    """Whether a group's parameter has a whole gradient, kept apart.

    That of another dtype is kept apart.
    """
    if parameter.unsharded_accumulated_grad is not None:
        return True
    # There is none before the first forward.
    whole = getattr(parameter, "unsharded_param", None)
    return whole is not None and whole.grad is not None
