"""Gradients that each rank clips by its own norm, and that are reduced after that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Factor, Facts, address_of
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.places import (
    CLIPPING,
    Place,
    here,
    is_within,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._ranks.witnesses import Told

_CLOSE, _MOST_STEPS, _ENOUGH_STEPS = 1e-3, 1000, 2
_aten = torch.ops.aten


class _Reduced(NamedTuple):
    clipped: Factor
    place: Place


@final
class ClippedAlone(Lint):
    """Looks for `clip_grad_norm_` before the collective that reduces gradients.

    The factor is another one on each rank.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, tuple[int, ...]], dict[int, _Reduced]] = (
            defaultdict(dict)
        )  # by step and ranks

    @override
    def operators(self) -> dict[Any, Seen]:
        multiplies = [_aten.mul_.Tensor, _aten._foreach_mul_.Tensor]
        return {op: self._multiplies for op in multiplies}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        clipped = facts.clipped
        if (
            not clipped
            or is_of_torch
            or told.kind not in ("all_reduce", "reduce_scatter")
        ):
            return
        for tensor in told.gives:
            flat = facts.flats.get(tensor)
            parts = [address_of(tensor)] if flat is None else list(flat.parts)
            found = next(
                (clipped[address] for address in parts if address in clipped), None
            )
            if found is not None and facts.steps < _MOST_STEPS:
                reduced = _Reduced(found, here())
                self._steps[facts.steps, tuple(told.ranks)].setdefault(
                    facts.rank, reduced
                )

    @override
    def findings(self) -> list[Finding | None]:
        apart: dict[Place, list[tuple[int, dict[int, _Reduced]]]] = defaultdict(list)
        for (step, ranks), by_rank in self._steps.items():
            factors = [
                one.clipped.number
                for one in by_rank.values()
                if one.clipped.number is not None
            ]
            if len(factors) == len(ranks) > 1 and max(factors) - min(
                factors
            ) > _CLOSE * max(factors):
                first = by_rank[min(by_rank)]
                apart[first.clipped.place].append(
                    (step + 1, dict(sorted(by_rank.items())))
                )
        return [
            _finding(*those[0])
            for those in apart.values()
            if len(those) >= _ENOUGH_STEPS
        ]

    def _multiplies(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if (
            facts.size < 2
            or facts.stepping is not None
            or not facts.addresses
            or not is_within(CLIPPING)
        ):
            return
        number = number_of(args[1])
        gradients = facts.gradients_in(args[0])
        if number is None or not gradients:
            return
        place = here()
        for address in gradients:
            before = facts.clipped.get(address)
            earlier = 1.0 if before is None or before.number is None else before.number
            facts.clipped[address] = Factor(earlier * number, place)


def _finding(step: int, by_rank: dict[int, _Reduced]) -> Finding | None:
    (first, one), (second, other), *_ = by_rank.items()
    places = list(dict.fromkeys([one.clipped.place, one.place]))
    return finding(
        "clipped-before-reduced",
        f"`clip_grad_norm_` ({one.clipped.place}) multiplies the gradients of each "
        f"rank by a number of its own before they are reduced ({one.place}): in step "
        f"{step}, {one.clipped.number:.4g} on rank {first} and "
        f"{other.clipped.number:.4g} on rank {second}. The rows of ranks with large "
        "gradients count less.",
        "Reduce the gradients first, and clip what comes out: it is the same on all "
        "ranks.",
        places,
    )
