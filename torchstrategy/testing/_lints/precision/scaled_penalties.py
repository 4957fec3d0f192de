"""Penalties of gradients that are those of a scaled loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.losses import is_scaled
from torchstrategy.testing._lints.evidence.pieces import Pieces
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower

_ENOUGH, _CLOSE = 2, 1e-4  # calls of `backward`
_aten = torch.ops.aten
_DIVIDES = (_aten.div.Tensor, _aten.div_.Tensor, _aten._foreach_div.Scalar, _aten._foreach_div_.Scalar)
_MULTIPLIES = (_aten.mul.Tensor, _aten.mul_.Tensor, _aten._foreach_mul.Scalar, _aten._foreach_mul_.Scalar)


@final
class ScaledPenalties(Follower):
    """Follows what is computed from the gradients of a scaled loss, until it is divided by the scale.

    The penalty of a gradient is a loss itself. `GradScaler` divides the gradients of all losses once, and not what a
    loss is computed from.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Pieces[Place]] = {}
        self._places: dict[int, Place] = {}  # by rank: where the gradients of the last penalty were computed
        self._times: Counter[tuple[Place, float]] = Counter()

    @override
    def differentiated(self, facts: Facts, outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        scale = facts.scale
        if not any(isinstance(one, torch.Tensor) and is_scaled(one, scale) for one in outputs):
            return
        place = self._places[facts.rank] = here()
        pieces = self._pieces.setdefault(facts.rank, Pieces())
        for gradient in gradients:
            if isinstance(gradient, torch.Tensor):
                pieces.add(gradient, place)

    @override
    def operator(self, facts: Facts, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        pieces = self._pieces[facts.rank]
        if facts.scale is not None and (func in _DIVIDES or func in _MULTIPLIES):
            number = number_of(args[1])
            several = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            by_the_scale = _is(number, facts.scale if func in _DIVIDES else 1 / facts.scale)
            if by_the_scale and any(pieces.find(one) is not None for one in several):
                self._pieces.pop(facts.rank)
                self._places.pop(facts.rank, None)
                return
        pieces.follow(func, args, kwargs, result)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        pieces, place = self._pieces.pop(facts.rank, None), self._places.pop(facts.rank, None)
        if pieces is None or place is None or facts.scale is None:
            return
        if any(pieces.find(loss) is not None for loss in losses):
            self._times[place, facts.scale] += 1

    @override
    def findings(self) -> list[Finding | None]:
        times: Counter[Place] = Counter()
        scales: dict[Place, float] = {}
        for (place, scale), count in self._times.items():
            times[place] += count
            scales.setdefault(place, scale)
        return [
            finding(
                "gradient-still-scaled",
                f"A loss is computed from gradients of a loss that a GradScaler has multiplied by {scales[place]:g} "
                f"({place}), and nothing has divided them: the penalty is one of gradients {scales[place]:g} times as "
                "large.",
                "Divide them first, `gradients = [one / scaler.get_scale() for one in gradients]`, and compute the "
                "penalty of the result.",
                [place],
            )
            for place, count in times.items()
            if count >= _ENOUGH
        ]


def _is(number: float | None, expected: float) -> bool:
    return number is not None and abs(number - expected) <= _CLOSE * expected
