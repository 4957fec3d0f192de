"""Gradients that ranks reduce together, each with another scale.

They are multiplied by scales of mixed precision.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of
from torchstrategy.testing._lints.evidence.losses import is_scaled
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import UNSCALE
from torchstrategy.testing._ranks.witnesses import Told

_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


class _Scaled(NamedTuple):
    """The loss whose gradients a rank has.

    By what it was multiplied, and where its `backward` was called.
    """

    scale: float
    place: Place


@final
@dataclass
class _Meeting:
    """A reduction to which ranks come with scaled gradients.

    Attributes:
        by_rank: What each has scaled them by.
        is_of_gradients: Whether some rank knows that they are gradients.
    """

    by_rank: dict[int, _Scaled] = field(default_factory=dict)
    is_of_gradients: bool = False


@final
class ScalesOfRanks(Lint):
    """Compares all ranks' scales when they reduce gradients that are still scaled.

    A rank that skips a step alone, since it has looked for overflows in its own part
    alone, goes on with a smaller scale. So does one that has loaded the state of its
    `GradScaler` alone.
    """

    def __init__(self) -> None:
        self._scaled: dict[int, _Scaled] = {}  # by rank
        self._going_back: set[int] = set()
        self._meetings: dict[Hashable, _Meeting] = {}
        self._found: dict[tuple[Place, Place], Finding | None] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return {UNSCALE: self._unscales}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._going_back.add(facts.rank)
        if facts.scale is not None and any(
            is_scaled(loss, facts.scale) for loss in losses
        ):
            self._scaled[facts.rank] = _Scaled(facts.scale, here())
        else:
            self._scaled.pop(facts.rank, None)

    @override
    def went_back(self, facts: Facts) -> None:
        self._going_back.discard(facts.rank)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._scaled.pop(facts.rank, None)

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        mine = self._scaled.get(facts.rank)
        if mine is None or told.kind not in _REDUCTIONS or len(told.ranks) < 2:
            return
        factors = [facts.factor_at(address_of(one)) for one in told.gives]
        if any(factor not in (1, 1 / len(told.ranks)) for factor in factors):
            return  # the program may have divided by the scale itself
        meeting = self._meetings.setdefault(told.key, _Meeting())
        meeting.by_rank[facts.rank] = mine
        # In a rank that steps a part of the parameters alone, the gradients of others
        # are not known as gradients.
        if facts.rank in self._going_back or any(
            _is_of_gradients(facts, one) for one in told.gives
        ):
            meeting.is_of_gradients = True
        other = next(
            (rank for rank, one in meeting.by_rank.items() if one.scale != mine.scale),
            None,
        )
        if other is not None and meeting.is_of_gradients:
            theirs = meeting.by_rank[other]
            self._found.setdefault(
                (theirs.place, mine.place), _finding({other: theirs, facts.rank: mine})
            )
        if len(meeting.by_rank) == len(told.ranks):
            del self._meetings[told.key]

    def _unscales(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._scaled.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        return list(self._found.values())


def _is_of_gradients(facts: Facts, tensor: torch.Tensor) -> bool:
    return (
        address_of(tensor) in facts.addresses - {0}
        or facts.flats.get(tensor) is not None
    )


def _finding(by_rank: dict[int, _Scaled]) -> Finding | None:
    places = list(dict.fromkeys(one.place for one in by_rank.values()))
    scales = " and ".join(
        f"rank {rank} by {one.scale:g}" for rank, one in sorted(by_rank.items())
    )
    return finding(
        "gradients-of-other-scales",
        f"Ranks reduce gradients of losses ({', '.join(map(str, places))}) that a "
        f"GradScaler has multiplied by scales that differ: {scales}. Each rank divides "
        "the result by its own scale.",
        "All ranks have to skip the same steps, and to load the same state: reduce "
        "`found_inf` over the ranks with `MAX` before `scaler.step(optimizer)`, and "
        "call `scaler.load_state_dict(state)` on all ranks.",
        places,
    )
