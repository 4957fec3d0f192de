"""Gradients of a scaled loss that are added to gradients which are unscaled already, or have another scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.facts import Backward, Facts, address_of, addresses_of
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.fingerprints import can_be_read, is_zero
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.places import Place, here
from torchstrategy.testing._lints.torch_internals import UNSCALE

_ENOUGH = 2  # calls of `backward`


@final
@dataclass
class _Rank:
    """What is known of a rank since its last step.

    Attributes:
        addresses: Where gradients are that were unscaled.
        place: Where that was.
        left: The parameters, by id, that have such a gradient, which is not zero, when `backward` begins.
    """

    addresses: set[int] = field(default_factory=set)
    place: Place | None = None
    left: set[int] = field(default_factory=set)


class _Added(NamedTuple):
    unscaled_at: Place
    backward_at: Place


class _Scaled(NamedTuple):
    """A gradient as `backward` has left it: where it is, how often it was written, and of what scale it is."""

    address: int
    version: int
    scale: float
    place: Place


class _OtherScale(NamedTuple):
    """A `backward` that adds gradients of one scale to those of another one."""

    before: float
    after: float
    before_at: Place
    after_at: Place


@final
class UnscaledSums(Lint):
    """Looks for `unscale_` and `update` between micro-batches of one step: both are for once, after the last one."""

    def __init__(self) -> None:
        self._scaled: dict[int, dict[int, _Scaled]] = defaultdict(dict)  # by rank and id of the parameter
        self._untouched: dict[int, dict[int, _Scaled]] = defaultdict(dict)  # of these, when `backward` begins
        self._mixed: dict[int, dict[int, tuple[_Scaled, _OtherScale]]] = defaultdict(dict)  # of these: with two scales
        self._other_scales: dict[tuple[Place, Place], _OtherScale] = {}
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
        scaled = self._scaled[facts.rank]
        self._untouched[facts.rank] = {
            id(one): scaled[id(one)]
            for one in (facts.parameters() if scaled else ())
            if id(one) in scaled and _is_at(one.grad, scaled[id(one)])
        }
        known = self._ranks.get(facts.rank)
        if known is not None:
            there = {id(one): one.grad for one in facts.parameters() if address_of(one.grad) in known.addresses}
            gradients = {own: one for own, one in there.items() if one is not None and can_be_read(one)}
            known.left = {own for own, gradient in gradients.items() if not is_zero(gradient)}

    @override
    def went_back(self, facts: Facts) -> None:
        known = self._ranks.pop(facts.rank, None)
        last = facts.backwards[-1] if facts.backwards else None
        if last is not None:
            self._compare_scales(facts, last)
        if known is None or known.place is None or last is None or last.scale in (None, 1.0):
            return
        if known.left & last.changed:
            self._added[_Added(known.place, last.place)] += 1

    def _compare_scales(self, facts: Facts, last: Backward) -> None:
        """Compares the scale of the last `backward` with that of the gradients to which it has added."""
        scaled, untouched = self._scaled[facts.rank], self._untouched.pop(facts.rank, {})
        if last.scale is None:
            scaled.clear()
            return
        for parameter in facts.parameters():
            gradient = parameter.grad
            if id(parameter) not in last.changed or gradient is None:
                continue
            before = untouched.get(id(parameter))
            now = scaled[id(parameter)] = _Scaled(address_of(gradient), gradient._version, last.scale, last.place)
            self._mixed[facts.rank].pop(id(parameter), None)
            if before is not None and before.scale != last.scale:
                other = _OtherScale(before.scale, last.scale, before.place, last.place)
                self._mixed[facts.rank][id(parameter)] = now, other

    @override
    def findings(self) -> list[Finding | None]:
        return [_of_other_scale(one) for one in self._other_scales.values()] + [
            finding(
                "scaled-added-to-unscaled",
                f"`backward` of a scaled loss ({added.backward_at}) adds to gradients that were unscaled before "
                f"({added.unscaled_at}), {times} times: the gradients of one micro-batch are as much larger than "
                "those of another as the scale says, or are divided by the scale twice.",
                "Call `scaler.unscale_(optimizer)` and `scaler.update()` once for each step: after `backward` of the "
                "last micro-batch.",
                [added.unscaled_at, added.backward_at],
            )
            for added, times in self._added.items()
            if times >= _ENOUGH
        ]

    def _unscales(self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        gradients = facts.addresses.intersection(addresses_of(args[0])) - {0}
        for parameter in facts.parameters() if self._mixed[facts.rank] else ():
            now, other = self._mixed[facts.rank].get(id(parameter), (None, None))
            gradient = parameter.grad
            if now is None or other is None or gradient is None or now.address not in gradients:
                continue
            # Nobody has written on it but `unscale_` now: what is set to zero before a step counts nowhere.
            if address_of(gradient) == now.address and gradient._version <= now.version + 1:
                self._other_scales.setdefault((other.before_at, other.after_at), other)
        if gradients:
            known = self._ranks[facts.rank]
            known.addresses |= gradients
            known.place = here()


def _is_at(gradient: torch.Tensor | None, scaled: _Scaled) -> bool:
    """Whether a gradient is what `backward` has left: nobody has written on it since then."""
    if gradient is None or gradient.is_inference() or address_of(gradient) != scaled.address:
        return False
    return gradient._version == scaled.version and not is_zero(gradient)


def _of_other_scale(one: _OtherScale) -> Finding | None:
    places = list(dict.fromkeys([one.before_at, one.after_at]))
    return finding(
        "gradients-of-other-scales",
        f"`backward` of a loss that a GradScaler has multiplied by {one.after:g} ({one.after_at}) adds to gradients of "
        f"a loss that it has multiplied by {one.before:g} ({one.before_at}): `scaler.update()` has changed the scale "
        "between them. All are divided by one scale later.",
        "Call `scaler.update()` once for each step, after `backward` of its last micro-batch. Optimizers that make "
        "their steps at other times need a GradScaler each.",
        places,
    )
