"""Gradients that add up those of losses with different scales.

They are scales of mixed precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import (
    Backward,
    Facts,
    address_of,
    addresses_of,
)
from torchstrategy.testing._lints.evidence.fingerprints import is_zero, number_of
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import UNSCALE

_CLOSE = 1e-4  # torch computes the inverse in float32


class _Scaled(NamedTuple):
    """A gradient as `backward` has left it.

    Attributes:
        address: Where it is.
        version: How often it was written.
        scale: By what `GradScaler` has multiplied the last loss.
        place: Where that `backward` was.
        before: What it was before, if that had another scale.
    """

    address: int
    version: int
    scale: float
    place: Place
    before: _Scaled | None


@final
class MixedScales(Lint):
    """Looks for `update` between micro-batches of one step: it is for the last one.

    It is to be called once, after the last of them.

    Only gradients that an optimizer uses count. The loss of a generator goes through
    the discriminator, too, whose gradients of it are set to zero.
    """

    def __init__(self) -> None:
        # By rank and id of the parameter.
        self._scaled: dict[int, dict[int, _Scaled]] = defaultdict(dict)
        # By rank, those of them that `backward` finds as they were.
        self._untouched: dict[int, set[int]] = {}
        self._found: dict[tuple[Place, Place], Finding | None] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return {UNSCALE: self._unscales}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        scaled = self._scaled[facts.rank]
        there = (
            [one for one in facts.parameters() if id(one) in scaled] if scaled else []
        )
        self._untouched[facts.rank] = {
            id(one) for one in there if _is_at(one.grad, scaled[id(one)])
        }

    @override
    def went_back(self, facts: Facts) -> None:
        untouched = self._untouched.pop(facts.rank, set())
        if facts.backwards:
            self._note(facts, facts.backwards[-1], untouched)

    @override
    def findings(self) -> list[Finding | None]:
        return list(self._found.values())

    def _note(self, facts: Facts, last: Backward, untouched: set[int]) -> None:
        """Notes the scale of gradients that the last `backward` has written."""
        scaled = self._scaled[facts.rank]
        if last.scale is None:
            scaled.clear()
            return
        for parameter in facts.parameters():
            gradient, own = parameter.grad, id(parameter)
            if own not in last.changed or gradient is None:
                continue
            before = scaled[own] if own in untouched else None
            if before is not None and before.scale == last.scale:
                before = None
            scaled[own] = _Scaled(
                address_of(gradient),
                version_of(gradient),
                last.scale,
                last.place,
                before,
            )

    def _unscales(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        scaled = self._scaled[facts.rank]
        if not scaled:
            return
        inverse = number_of(args[2])
        # By what the gradients are divided; by nothing if it only looks for overflows,
        # as for a fused optimizer.
        now = 1 / inverse if inverse and inverse != 1 else None
        if not any(
            one.before is not None or _is_other(one.scale, now)
            for one in scaled.values()
        ):
            return
        # Also those of an optimizer that steps after another one.
        gradients = set(addresses_of(args[0])) - {0}
        for parameter in facts.parameters() if gradients else ():
            one, gradient = scaled.get(id(parameter)), parameter.grad
            if one is None or gradient is None or one.address not in gradients:
                continue
            # Nobody has written on it but `unscale_` now: what is set to zero before a
            # step counts nowhere.
            if (
                address_of(gradient) != one.address
                or version_of(gradient) > one.version + 1
            ):
                continue
            if one.before is not None:
                self._found.setdefault(
                    (one.before.place, one.place), _finding(one.before, one)
                )
            elif now is not None and _is_other(one.scale, now):
                place = here()
                self._found.setdefault(
                    (one.place, place), _finding_of_step(one, now, place)
                )


def _is_other(scale: float, now: float | None) -> bool:
    return now is not None and abs(now - scale) > _CLOSE * scale


def _is_at(gradient: torch.Tensor | None, scaled: _Scaled) -> bool:
    """Whether a gradient is what `backward` left: nobody has written on it since."""
    if (
        gradient is None
        or gradient.is_inference()
        or address_of(gradient) != scaled.address
    ):
        return False
    return version_of(gradient) == scaled.version and not is_zero(gradient)


def _finding_of_step(one: _Scaled, now: float, place: Place) -> Finding | None:
    return finding(
        "gradients-of-other-scales",
        f"A GradScaler divides gradients by {now:g} ({place}), and has multiplied "
        f"their loss by {one.scale:g} ({one.place}): `scaler.update()` has changed the "
        "scale between them.",
        "Call `scaler.update()` once for each step, after `scaler.step(optimizer)` of "
        "the last optimizer.",
        list(dict.fromkeys([one.place, place])),
    )


def _finding(before: _Scaled, after: _Scaled) -> Finding | None:
    return finding(
        "gradients-of-other-scales",
        f"`backward` of a loss that a GradScaler has multiplied by {after.scale:g} "
        f"({after.place}) adds to gradients of a loss that it has multiplied by "
        f"{before.scale:g} ({before.place}): `scaler.update()` has changed the scale "
        "between them. All are divided by one scale later.",
        "Call `scaler.update()` once for each step, after `backward` of its last "
        "micro-batch. Optimizers that make their steps at other times need a "
        "GradScaler each.",
        list(dict.fromkeys([before.place, after.place])),
    )
