"""Optimizers whose parameters, or some, are not those of the trained model.

They no longer are.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.modules import (
    living_modules,
    named_parameters,
    own_parameters,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import held_here

# One or two steps without a gradient can be on purpose, as where a part is trained
# later.
_ENOUGH_STEPS = 3


class _Gradient(NamedTuple):
    """What a rank has of a gradient, as it was at one moment."""

    reference: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def of(cls, gradient: torch.Tensor | None) -> _Gradient:
        held = held_here(gradient)
        assert held is not None
        return cls(weakref.ref(held), version_of(held))

    def is_left(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is still this one, and nobody has added to it."""
        held = held_here(gradient)
        return (
            held is not None
            and self.reference() is held
            and self.version == version_of(held)
        )


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        made_at: Where it was made.
        steps_at: Where it made its last step.
        steps: How many steps it has made, each after a `backward`.
        names: Parameters that were trained in the place of its own, by name.
        count: How many parameters it has.
        has_gradients: Whether a parameter of it had a gradient, in any step.
        left: The gradients that parameters of no optimizer had one step before, by id,
            each with its version.
        stale: The positions of parameters that had no gradient in any step; None before
            the first.
        is_partial: Whether others had some by the time when it was found.
        is_over: Whether it is not looked at any more.
        versions: Of the parameters without a gradient, before a step.
    """

    made_at: Place
    steps_at: Place | None = None
    steps: int = 0
    names: list[str] = field(default_factory=list)
    count: int = 0
    has_gradients: bool = False
    left: dict[int, _Gradient] = field(default_factory=dict)
    stale: set[int] | None = None
    is_partial: bool = False
    is_over: bool = False
    versions: dict[int, int] = field(default_factory=dict)


@final
class Orphans(Lint):
    """Looks for optimizers without any gradient, while other parameters get some.

    No optimizer has these.

    Of an optimizer with gradients for some of its parameters, it looks at the others,
    if no module has them any more.
    """

    def __init__(self) -> None:
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._all: list[_Seen] = []
        # The ranks that have called `backward` since their last step.
        self._went_back: set[int] = set()

    @override
    def has_optimizer(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._seen:
            self._seen[optimizer] = _Seen(here())
            self._all.append(self._seen[optimizer])

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._went_back.add(facts.rank)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.get(optimizer)
        if seen is None:
            return
        _look_for_gradients(seen, optimizer)
        if seen.is_over or facts.rank not in self._went_back:
            return
        seen.steps += 1
        seen.steps_at = here()
        if seen.steps == _ENOUGH_STEPS - 1:
            seen.left = {
                id(one): _Gradient.of(one.grad) for _, one in self._of_no_optimizer()
            }
        if seen.steps == _ENOUGH_STEPS:
            stale = [
                parameter
                for at, parameter in enumerate(parameters_of(optimizer))
                if at in (seen.stale or ())
            ]
            seen.count, seen.is_partial = len(stale), seen.has_gradients
            if not seen.is_partial or not _have_a_module(stale):
                seen.names = self._trained_in_place_of(stale, seen.left)
            seen.is_over = not seen.names
            seen.versions = (
                {id(one): version_of(one) for one in stale} if seen.names else {}
            )

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._went_back.discard(facts.rank)
        seen = self._seen.get(optimizer)
        if seen is not None:  # a closure makes gradients only in the step
            _look_for_gradients(seen, optimizer)
            versions, seen.versions = seen.versions, {}
            if any(
                versions.get(id(one), version_of(one)) != version_of(one)
                for one in parameters_of(optimizer)
            ):
                # The step changes them: it has their gradients from elsewhere.
                seen.names, seen.is_over = [], True

    @override
    def findings(self) -> list[Finding | None]:
        found: list[Finding | None] = []
        for seen in self._all:
            if (
                not seen.names
                or not seen.stale
                or seen.steps_at is None
                or seen.has_gradients != seen.is_partial
            ):
                continue
            places = [seen.made_at, seen.steps_at]
            which = (
                f"{seen.count} of its"
                if seen.is_partial
                else f"none of its {seen.count}"
            )
            had = (
                "never had a gradient, and no module has them"
                if seen.is_partial
                else "ever had a gradient"
            )
            found.append(
                finding(
                    "optimizer-of-other-parameters",
                    f"The optimizer that is made at {seen.made_at} has made "
                    f"{seen.steps} steps ({in_words([seen.steps_at])}), and {which} "
                    f"parameters {had}. Parameters of the same shapes that no "
                    f"optimizer has got the gradients: {some(seen.names)}.",
                    "Make the optimizer last, from `model.parameters()`: after "
                    "`fully_shard`, and after modules are copied or replaced.",
                    places,
                )
            )
        return found

    def _of_no_optimizer(self) -> Iterator[tuple[str, Any]]:
        """The parameters with gradients that are in no optimizer, with their names.

        They are parameters of modules.
        """
        owned = {
            id(parameter)
            for each in list(self._seen)
            for parameter in parameters_of(each)
        }
        for module in living_modules():
            for name, parameter in named_parameters(module):
                if parameter.grad is not None and id(parameter) not in owned:
                    yield name, parameter

    def _trained_in_place_of(
        self, stale: Sequence[torch.Tensor], left: dict[int, _Gradient]
    ) -> list[str]:
        """Parameters of no optimizer that this step gives gradients.

        There are none if they are not like those without any.

        A model of earlier, whose optimizer nobody has seen, keeps the gradients that it
        had one step before.
        """
        wanted = Counter(tuple(parameter.shape) for parameter in stale)
        names: dict[int, str] = {}
        there: dict[int, torch.Tensor] = {}
        for name, parameter in self._of_no_optimizer():
            known = left.get(id(parameter))
            if known is not None and known.is_left(parameter.grad):
                continue
            there[id(parameter)] = parameter
            names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
        shapes = Counter(tuple(parameter.shape) for parameter in there.values())
        alike = sum((wanted & shapes).values())
        if 2 * alike < sum(wanted.values()) or not alike:
            return []
        return list(
            dict.fromkeys(
                names[own] for own, one in there.items() if tuple(one.shape) in wanted
            )
        )


def _have_a_module(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a module that there is has one of some parameters."""
    wanted = set(map(id, parameters))
    return any(
        not wanted.isdisjoint(id(one) for _, one in own_parameters(module))
        for module in living_modules()
    )


def _look_for_gradients(seen: _Seen, optimizer: torch.optim.Optimizer) -> None:
    if seen.is_over:
        return
    parameters = parameters_of(optimizer)
    without = {at for at, parameter in enumerate(parameters) if parameter.grad is None}
    seen.has_gradients |= len(without) < len(parameters)
    seen.stale = without if seen.stale is None else seen.stale & without
    seen.is_over = not seen.stale
