"""Batch norm whose statistics count a batch again.

They do when `torch.utils.checkpoint` computes a part of a model again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, final

from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.places import (
    CHECKPOINTS,
    Place,
    is_computed_again,
    lines_around,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.layers.batch_norm import BATCH_NORMS
from torchstrategy.testing._lints.lint import Lint, Seen

_ENOUGH = 4  # layers times steps


@final
class CountedAgain(Lint):
    """Looks for batch norm in training mode in a part that backward computes again."""

    def __init__(self) -> None:
        # By where the program has called the part.
        self._again: Counter[Place] = Counter()

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(BATCH_NORMS, self._normalizes)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "statistics-counted-twice",
                f"Backward computes the part that is called at {place} again, and "
                "batch norm in it moves its running statistics again: each batch "
                "counts twice. They follow the last batches more closely than "
                "`momentum` says, and evaluation has other numbers than without "
                "`checkpoint`.",
                "Leave batch norm out of the part, or use a norm without running "
                "statistics.",
                [place],
            )
            for place, times in self._again.items()
            if times >= _ENOUGH
        ]

    def _normalizes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        mean, is_training, momentum = args[3], args[5], args[6]
        if mean is not None and is_training and momentum and is_computed_again():
            part = lines_around(CHECKPOINTS)[1]
            self._again[part or Place("", 0)] += 1
