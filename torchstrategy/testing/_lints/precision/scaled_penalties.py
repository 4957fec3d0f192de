"""Penalties of gradients that are those of a scaled loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, tensors_in
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.losses import is_scaled
from torchstrategy.testing._lints.evidence.pieces import Pieces
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower

_ENOUGH = 2  # calls of `backward`
_aten = torch.ops.aten
_SCALING = {
    _aten.mul,
    _aten.mul_,
    _aten.div,
    _aten.div_,
    _aten._foreach_mul,
    _aten._foreach_mul_,
}
_SCALING |= {_aten._foreach_div, _aten._foreach_div_}
_ADDING = {_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.rsub}


@final
class ScaledPenalties(Follower):
    """Follows what is computed from the gradients of a scaled loss, as their norm.

    It does until a constant is taken from it.

    The penalty of a gradient is a loss itself. `GradScaler` divides the gradients of
    all losses once, and not what a loss is computed from. A gradient that is multiplied
    or divided before, by whatever, is left alone: by the scale, or by its own norm. So
    is what has no constant: it may be scaled once, and on purpose.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Pieces[Place]] = {}
        self._has_constant: set[int] = set()  # ranks
        # Of each call of `backward`.
        self._scales: dict[Place, list[float]] = defaultdict(list)

    @override
    def differentiated(
        self, facts: Facts, outputs: Sequence[Any], gradients: Sequence[Any]
    ) -> None:
        if not any(
            isinstance(one, torch.Tensor) and is_scaled(one, facts.scale)
            for one in outputs
        ):
            return
        place = here()
        pieces = self._pieces.setdefault(facts.rank, Pieces())
        for gradient in gradients:
            if isinstance(gradient, torch.Tensor):
                pieces.add(gradient, place)

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        # An operator of a higher order, such as `torch.cond`, has no overloads.
        pieces, kind = self._pieces[facts.rank], getattr(func, "overloadpacket", None)
        if kind not in _SCALING and kind not in _ADDING:
            pieces.follow(func, args, kwargs, result)
        elif any(pieces.find(one) is not None for one in tensors_in(args[:2])):
            is_shifted = (
                kind in _ADDING
                and kwargs.get("alpha", 1) == 1
                and _has_constant(args[:2])
            )
            if is_shifted:
                self._has_constant.add(facts.rank)
            if is_shifted or facts.rank in self._has_constant:
                pieces.follow(func, args, kwargs, result)
            else:
                self._forget(facts.rank)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        pieces = self._pieces.get(facts.rank)
        if (
            pieces is not None
            and facts.scale is not None
            and facts.rank in self._has_constant
        ):
            places = [
                pieces.find(loss) for loss in losses if is_scaled(loss, facts.scale)
            ]
            for place in {one for one in places if one is not None}:
                self._scales[place].append(facts.scale)
        self._forget(facts.rank)

    def _forget(self, rank: int) -> None:
        self._pieces.pop(rank, None)
        self._has_constant.discard(rank)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "gradient-still-scaled",
                "A loss is computed from gradients of a loss that a GradScaler has "
                f"multiplied by {scales[0]:g} ({place}), and nothing has divided them: "
                f"the penalty is one of gradients {scales[0]:g} times as large.",
                "Divide them first, `gradients = [one / scaler.get_scale() for one in "
                "gradients]`, and compute the penalty of the result.",
                [place],
            )
            for place, scales in self._scales.items()
            if len(scales) >= _ENOUGH
        ]


def _has_constant(args: Sequence[Any]) -> bool:
    """Whether a number other than 0 is among what is added, as in `norm - 1`."""
    return any(
        not isinstance(one, torch.Tensor) and bool(number_of(one)) for one in args
    )
