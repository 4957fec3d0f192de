"""Gradients that are clipped while multiplied by mixed precision's scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, addresses_of
from torchstrategy.testing._lints.evidence.operators import DIVIDING
from torchstrategy.testing._lints.evidence.places import (
    CLIPPING,
    Place,
    frames_of,
    here,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import UNSCALE

_LIMITS = ("max_norm", "clip_value")  # what its functions call the limit
# A limit that the program has multiplied by the scale is not so far below the scale.
_FAR_BELOW = 100
_aten = torch.ops.aten


class _Clipped(NamedTuple):
    place: Place
    limit: float
    scale: float
    is_norm: bool


@final
class Clipping(Lint):
    """Sees what `clip_grad_norm_` and `clip_grad_value_` write.

    It sees whether `unscale_` came before.
    """

    def __init__(self) -> None:
        # The addresses of gradients, by rank.
        self._unscaled: dict[int, set[int]] = defaultdict(set)
        self._found: dict[Place, _Clipped] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        clips = [
            _aten.mul_.Tensor,
            _aten._foreach_mul_.Tensor,
            _aten.clamp_.default,
            _aten._foreach_clamp_max_.Scalar,
        ]
        seen: dict[Any, Seen] = {op: self._writes for op in clips}
        divides = [
            *DIVIDING,
            _aten.mul_.Scalar,
            _aten._foreach_mul_.Scalar,
            _aten.copy_.default,
        ]
        seen |= {op: self._unscales for op in divides}
        seen[UNSCALE] = self._unscales
        return seen

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._unscaled.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "clipped-while-scaled",
                "Gradients of a loss that a GradScaler has multiplied by "
                f"{one.scale:g} are clipped at {one.place} to "
                f"{'a norm' if one.is_norm else 'values'} of {one.limit:g}, before "
                "they are divided by it: of the true gradients, that is "
                f"{one.limit / one.scale:.2g}.",
                "Call `scaler.unscale_(optimizer)` before you clip.",
                [one.place],
            )
            for one in self._found.values()
        ]

    def _unscales(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        # What the program has multiplied or written itself may be unscaled.
        if _scale(facts) is not None:
            self._unscaled[facts.rank] |= _gradients(facts, args[0])

    def _writes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        scale = _scale(facts)
        if scale is None or not (gradients := _gradients(facts, args[0])):
            return
        limit = _limit()
        if limit is None:
            self._unscaled[facts.rank] |= gradients
        elif gradients - self._unscaled[facts.rank] and limit[1] * _FAR_BELOW < scale:
            place = here()
            self._found.setdefault(
                place, _Clipped(place, limit[1], scale, limit[0] == "max_norm")
            )


def _scale(facts: Facts) -> float | None:
    """By what the last loss was multiplied; None if by nothing."""
    return facts.backwards[-1].scale if facts.backwards else None


def _gradients(facts: Facts, written: Any) -> set[int]:
    return facts.addresses.intersection(addresses_of(written)) - {0}


def _limit() -> tuple[str, float] | None:
    """To what torch is clipping gradients now; None if it is not."""
    for frame in frames_of(CLIPPING):
        for name in _LIMITS:
            if isinstance(limit := frame.f_locals.get(name), (int, float)):
                return name, float(limit)
    return None
