"""Steps with gradients that are still multiplied by the scale of mixed precision."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import (
    Facts,
    address_of,
    addresses_of,
    parameters_of,
)
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import UNSCALE, has_hooks_of_gradients

_ENOUGH_STEPS = 2
_STILL_SCALED = 8  # what is left of the scale: less can be what a program means


class _Scaled(NamedTuple):
    """The gradient of a loss that `GradScaler` scaled, as it was after `backward`."""

    parameter: weakref.ref[torch.Tensor]
    address: int
    version: int
    scale: float
    place: Place


class _Found(NamedTuple):
    backward_at: Place
    steps_at: Place
    scale: float


@final
class ScaledSteps(Lint):
    """Looks for steps with gradients of a scaled loss that nobody has looked at.

    Nobody has written them since, nor has `GradScaler` looked at them.

    What the program has written in another way than by numbers that are known may be
    unscaled: it is left alone.
    """

    def __init__(self) -> None:
        # By rank and id of the parameter.
        self._scaled: dict[int, dict[int, _Scaled]] = defaultdict(dict)
        # The addresses of gradients, by rank.
        self._unscaled: dict[int, set[int]] = defaultdict(set)
        # With what the step that a rank is making has begun.
        self._open: dict[int, list[_Scaled]] = {}
        self._steps: Objects[torch.optim.Optimizer, int] = Objects()
        self._found: dict[Place, _Found] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return {UNSCALE: self._unscales}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._unscaled.pop(facts.rank, None)

    @override
    def went_back(self, facts: Facts) -> None:
        known = self._scaled[facts.rank]
        call = facts.backwards[-1] if facts.backwards else None
        if call is None or (call.scale is None and not known):
            return
        for parameter in facts.parameters():
            if id(parameter) not in call.changed:
                continue
            known.pop(id(parameter), None)
            gradient = parameter.grad
            # A hook of the program may have divided the gradient already.
            if (
                call.scale is not None
                and gradient is not None
                and not has_hooks_of_gradients(parameter)
            ):
                address = address_of(gradient)
                there = weakref.ref(parameter)
                known[id(parameter)] = _Scaled(
                    there, address, version_of(gradient), call.scale, call.place
                )

    @override
    def zeroed(self, facts: Facts) -> None:
        self._scaled[facts.rank].clear()

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._open.pop(facts.rank, None)
        known = self._scaled[facts.rank]
        if not known:
            return
        with_gradient = [
            parameter
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None
        ]
        scaled = [
            known[id(parameter)]
            for parameter in with_gradient
            if id(parameter) in known
        ]
        if (
            scaled
            and len(scaled) == len(with_gradient)
            and all(self._is_scaled(facts, one) for one in scaled)
        ):
            self._open[facts.rank] = scaled

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        scaled = self._open.pop(facts.rank, [])
        # An optimizer of the program's own may divide them in its step.
        if not scaled or not all(self._is_scaled(facts, one) for one in scaled):
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] == _ENOUGH_STEPS:
            place = here()
            self._found.setdefault(
                place, _Found(scaled[0].place, place, scaled[0].scale)
            )

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "gradient-still-scaled",
                f"The optimizer makes its step ({one.steps_at}) with gradients of a "
                f"loss that a GradScaler has multiplied by {one.scale:g} "
                f"({one.backward_at}), and nothing has divided them by it. Nor is a "
                "step with inf or NaN left out.",
                "`scaler.step(optimizer)` and `scaler.update()` in place of "
                "`optimizer.step()`.",
                [one.backward_at, one.steps_at],
            )
            for one in self._found.values()
        ]

    def _unscales(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._unscaled[facts.rank].update(addresses_of(args[0]))

    def _is_scaled(self, facts: Facts, scaled: _Scaled) -> bool:
        parameter = scaled.parameter()
        gradient = None if parameter is None else parameter.grad
        if (
            gradient is None
            or address_of(gradient) != scaled.address
            or scaled.address in self._unscaled[facts.rank]
        ):
            return False
        factor = facts.factor_at(scaled.address)
        if factor is None:
            return False
        is_written = version_of(gradient) != scaled.version
        # Which writes it, and a division by the ranks comes with it.
        was_reduced = scaled.address in facts.reduced
        return (not is_written or was_reduced) and abs(
            factor * scaled.scale
        ) >= _STILL_SCALED
