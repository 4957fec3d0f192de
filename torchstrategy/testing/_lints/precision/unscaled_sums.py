"""Gradients of a scaled loss that are added to gradients which are unscaled already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read, is_zero
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import UNSCALE

_ENOUGH = 2  # calls of `backward`


@final
@dataclass
class _Rank:
    """What is known of a rank since its last step.

    Attributes:
        addresses: Where gradients are that were unscaled.
        place: Where that was.
        left: The parameters, by id, that have such a gradient, which is not zero, when
            `backward` begins.
    """

    addresses: set[int] = field(default_factory=set)
    place: Place | None = None
    left: set[int] = field(default_factory=set)


class _Added(NamedTuple):
    unscaled_at: Place
    backward_at: Place


@final
class UnscaledSums(Lint):
    """Looks for `unscale_` between micro-batches of one step.

    It is to be called once, after the last of them.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._added: dict[_Added, int] = defaultdict(int)

    @override
    def operators(self) -> dict[Any, Seen]:
        return {UNSCALE: self._unscales}

    @override
    def zeroed(self, facts: Facts) -> None:
        self._ranks.pop(facts.rank, None)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._ranks.pop(facts.rank, None)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        known = self._ranks.get(facts.rank)
        if known is not None:
            there = {
                id(one): one.grad
                for one in facts.parameters()
                if address_of(one.grad) in known.addresses
            }
            gradients = {
                own: one
                for own, one in there.items()
                if one is not None and can_be_read(one)
            }
            known.left = {
                own for own, gradient in gradients.items() if not is_zero(gradient)
            }

    @override
    def went_back(self, facts: Facts) -> None:
        known = self._ranks.pop(facts.rank, None)
        last = facts.backwards[-1] if facts.backwards else None
        if (
            known is None
            or known.place is None
            or last is None
            or last.scale in (None, 1.0)
        ):
            return
        if known.left & last.changed:
            self._added[_Added(known.place, last.place)] += 1

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "scaled-added-to-unscaled",
                f"`backward` of a scaled loss ({added.backward_at}) adds to gradients "
                f"that were unscaled before ({added.unscaled_at}), {times} times: the "
                "gradients of one micro-batch are as much larger than those of another "
                "as the scale says, or are divided by the scale twice.",
                "Call `scaler.unscale_(optimizer)` and `scaler.update()` once for each "
                "step: after `backward` of the last micro-batch.",
                [added.unscaled_at, added.backward_at],
            )
            for added, times in self._added.items()
            if times >= _ENOUGH
        ]

    def _unscales(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        gradients = facts.gradients_in(args[0])
        if gradients:
            known = self._ranks[facts.rank]
            known.addresses |= gradients
            known.place = here()
