"""Averages of weights whose memory is that of the weights themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, addresses_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen

_ENOUGH_STEPS = 2
_CLOSE = 1e-6
_aten = torch.ops.aten
_DECAYS = (_aten.mul_.Tensor, _aten.mul_.Scalar, _aten._foreach_mul_.Scalar)
_ADDS = (_aten.add_.Tensor, _aten._foreach_add_.List)
_LERPS = (
    _aten.lerp_.Scalar,
    _aten.lerp_.Tensor,
    _aten._foreach_lerp_.Scalar,
    _aten._foreach_lerp_.List,
)


class _Found(NamedTuple):
    averaged: int
    parameters: int


@final
@dataclass
class _Seen:
    """What a rank has done since its last step.

    Attributes:
        decays: By what memory was multiplied, if it was a number between 0 and 1, by
            its address.
        averaged: Memory that was averaged with itself.
        place: Where that was.
        steps: How many steps in a row this was so for most parameters.
    """

    decays: dict[int, float] = field(default_factory=dict)
    averaged: set[int] = field(default_factory=set)
    place: Place | None = None
    steps: int = 0


@final
class Aliases(Lint):
    """Looks for moving averages in place of parameters with the average's memory.

    `average = decay * average + (1 - decay) * parameter` is one.

    `p.add_(p, alpha=-rate)` is decay of weights, and no average: the two factors have
    to be 1 together.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = defaultdict(_Seen)
        self._found: dict[Place, _Found] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        seen: dict[Any, Seen] = dict.fromkeys(_DECAYS, self._decays)
        seen |= dict.fromkeys(_ADDS, self._adds)
        return (
            seen
            | dict.fromkeys(_LERPS, self._lerps)
            | {_aten.mul.Tensor: self._multiplies}
        )

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._seen[facts.rank].decays.clear()

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen[facts.rank]
        seen.decays.clear()
        if not seen.averaged or seen.place is None:
            return
        addresses = {
            address_of(parameter)
            for parameter in facts.parameters()
            if parameter.requires_grad
        }
        addresses.discard(0)
        averaged = len(seen.averaged & addresses)
        seen.steps = (
            seen.steps + 1 if averaged and 2 * averaged >= len(addresses) else 0
        )
        if seen.steps == _ENOUGH_STEPS:
            self._found.setdefault(seen.place, _Found(averaged, len(addresses)))
        seen.averaged, seen.place = set(), None

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "average-is-the-weights",
                f"The average of weights that is updated at {place} has the memory of "
                f"the weights themselves, for {found.averaged} of {found.parameters} "
                "parameters. It is no average, since it follows each step, and an "
                "update that multiplies and adds changes the weights.",
                "Begin the average with copies, `p.detach().clone()` or "
                "`copy.deepcopy(model)`: `p.data` and `model.state_dict()` share the "
                "memory of the parameters.",
                [place],
            )
            for place, found in self._found.items()
        ]

    def _decays(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        seen, decay = self._seen[facts.rank], args[1]
        if facts.stepping is None and isinstance(decay, (int, float)) and 0 < decay < 1:
            # One that is divided among ranks has no address here.
            seen.decays.update(
                dict.fromkeys(filter(None, addresses_of(args[0])), decay)
            )

    def _adds(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        seen = self._seen[facts.rank]
        if seen.decays and facts.stepping is None:
            for address in _of_both(args):
                self._note_if_whole(seen, address, kwargs.get("alpha", 1))

    def _multiplies(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """`average.mul_(decay)`, and then `average += (1 - decay) * parameter`."""
        seen = self._seen[facts.rank]
        if seen.decays and isinstance(args[1], (int, float)):
            self._note_if_whole(seen, address_of(args[0]), args[1])

    def _lerps(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        seen = self._seen[facts.rank]
        for address in _of_both(args) if facts.stepping is None else ():
            _note(seen, address)

    def _note_if_whole(self, seen: _Seen, address: int, share: Any) -> None:
        decay = seen.decays.get(address)
        if decay is not None and abs(decay + share - 1) < _CLOSE:
            _note(seen, address)


def _note(seen: _Seen, address: int) -> None:
    seen.place = seen.place or here()
    seen.averaged.add(address)


def _of_both(args: Sequence[Any]) -> list[int]:
    """The addresses that one place of the first and second argument have."""
    pairs = zip(addresses_of(args[0]), addresses_of(args[1]), strict=False)
    return [own for own, other in pairs if own and own == other]
