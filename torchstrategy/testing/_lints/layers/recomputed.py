"""Dropout that drops other values when a part of a model is computed again.

`torch.utils.checkpoint` computes it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    checksum,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.places import (
    CHECKPOINTS,
    Place,
    is_computed_again,
    is_within,
    lines_around,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen

_MOST = 64  # masks that a rank has drawn again
_aten = torch.ops.aten


@final
@dataclass
class _Drawn:
    """Masks that were drawn at a line.

    Attributes:
        part: Where the program has called the part that is computed again.
        again: How many were drawn when it was computed again.
        is_alike: Whether some of these had been drawn before.
    """

    part: Place
    again: int = 0
    is_alike: bool = False


@final
class Recomputed(Lint):
    """Compares what dropout draws in a part that is computed again.

    It compares this with what dropout has drawn there before.
    """

    def __init__(self) -> None:
        # By rank: numbers, and sums of their bytes.
        self._masks: dict[int, set[tuple[int, int]]] = defaultdict(set)
        # By rank and line of the program in the part; None: there are only modules of
        # torch.
        self._drawn: dict[int, dict[Place | None, _Drawn]] = defaultdict(dict)
        self._again: dict[int, int] = defaultdict(int)

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(
            (_aten.native_dropout.default, _aten.bernoulli_.float), self._drops
        )

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[Place | None, _Drawn] = {}
        for drawn in self._drawn.values():
            for place, one in drawn.items():
                if one.again and not one.is_alike:
                    found.setdefault(place, one)
        return [_finding(one, place) for place, one in found.items()]

    def _drops(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        mask = result[1] if isinstance(result, (tuple, list)) else result
        if self._again[facts.rank] >= _MOST or not can_be_read(mask):
            return
        if not is_within(CHECKPOINTS, None):
            return
        drawn, masks = self._drawn[facts.rank], self._masks[facts.rank]
        place, part = lines_around(CHECKPOINTS)
        its = mask.numel(), checksum(numbers_of(mask))
        if not is_computed_again():
            masks.add(its)
            drawn.setdefault(place, _Drawn(part or Place("", 0)))
        elif place in drawn:
            self._again[facts.rank] += 1
            drawn[place].again += 1
            drawn[place].is_alike = drawn[place].is_alike or its in masks


def _finding(drawn: _Drawn, place: Place | None) -> Finding | None:
    where = "" if place is None else f" ({place})"
    return finding(
        "recomputed-with-other-dropout",
        f"Backward computes the part that is called at {drawn.part} again, and dropout "
        f"in it{where} drops other values than in the forward pass, {drawn.again} of "
        f"{drawn.again} times: `checkpoint` has not restored the state of the random "
        "generators. The gradient is not that of the loss.",
        "Leave `preserve_rng_state=False` out: `checkpoint(block, x, "
        "use_reentrant=False)`.",
        [drawn.part] if place is None else [drawn.part, place],
    )
