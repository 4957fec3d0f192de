"""Gradients that are sums of those of losses with different scales of mixed precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Backward, Facts, address_of
from torchstrategy.testing._lints.evidence.fingerprints import is_zero
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.places import Place
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import UNSCALE


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
    """Looks for `update` between micro-batches of one step: it is for once, after the last of them.

    Only gradients that an optimizer uses count. The loss of a generator goes through the discriminator, too, whose
    gradients of it are set to zero.
    """

    def __init__(self) -> None:
        self._scaled: dict[int, dict[int, _Scaled]] = defaultdict(dict)  # by rank and id of the parameter
        self._untouched: dict[int, set[int]] = {}  # by rank, those of them that `backward` finds as they were
        self._found: dict[tuple[Place, Place], Finding | None] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return {UNSCALE: self._unscales}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        scaled = self._scaled[facts.rank]
        there = [one for one in facts.parameters() if id(one) in scaled] if scaled else []
        self._untouched[facts.rank] = {id(one) for one in there if _is_at(one.grad, scaled[id(one)])}

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
            scaled[own] = _Scaled(address_of(gradient), version_of(gradient), last.scale, last.place, before)

    def _unscales(self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        scaled = self._scaled[facts.rank]
        gradients = facts.gradients_in(args[0]) if any(one.before is not None for one in scaled.values()) else set()
        for parameter in facts.parameters() if gradients else ():
            one, gradient = scaled.get(id(parameter)), parameter.grad
            if one is None or one.before is None or gradient is None or one.address not in gradients:
                continue
            # Nobody has written on it but `unscale_` now: what is set to zero before a step counts nowhere.
            if address_of(gradient) == one.address and version_of(gradient) <= one.version + 1:
                self._found.setdefault((one.before.place, one.place), _finding(one.before, one))


def _is_at(gradient: torch.Tensor | None, scaled: _Scaled) -> bool:
    """Whether a gradient is what `backward` has left: nobody has written on it since then."""
    if gradient is None or gradient.is_inference() or address_of(gradient) != scaled.address:
        return False
    return version_of(gradient) == scaled.version and not is_zero(gradient)


def _finding(before: _Scaled, after: _Scaled) -> Finding | None:
    return finding(
        "gradients-of-other-scales",
        f"`backward` of a loss that a GradScaler has multiplied by {after.scale:g} ({after.place}) adds to gradients "
        f"of a loss that it has multiplied by {before.scale:g} ({before.place}): `scaler.update()` has changed the "
        "scale between them. All are divided by one scale later.",
        "Call `scaler.update()` once for each step, after `backward` of its last micro-batch. Optimizers that make "
        "their steps at other times need a GradScaler each.",
        list(dict.fromkeys([before.place, after.place])),
    )
