"""Gradients that ranks have alike, and multiply by numbers that differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final

from torchstrategy.testing._lints.evidence.copies import Parted
from torchstrategy.testing._lints.evidence.facts import Factor
from torchstrategy.testing._lints.evidence.places import in_words
from torchstrategy.testing._lints.findings import Finding, finding

_CLOSE = 1e-3


@final
class MultipliedApart(NamedTuple):
    """Two ranks, and by what each has multiplied a gradient before a step."""

    step: int
    ranks: tuple[int, int]
    factors: tuple[Factor, Factor]

    def finding(self) -> Finding | None:
        """What to say of it."""
        places = list(dict.fromkeys(factor.place for factor in self.factors))
        numbers = " and by ".join(f"{factor.number:.4g}" for factor in self.factors)
        return finding(
            "gradients-scaled-apart",
            f"Ranks {self.ranks[0]} and {self.ranks[1]} have the same gradients, and "
            f"multiply them by numbers that differ ({in_words(places)}): in step "
            f"{self.step}, by {numbers}. Their weights differ since then.",
            "Multiply them by the same number on all ranks. To clip where ranks have "
            "parts of a model, add up the squared norms of all parts with "
            "`dist.all_reduce(squared)`, and count a parameter that all ranks have "
            "only once.",
            places,
        )


def multiplied_apart(parted: Iterable[Parted]) -> MultipliedApart | None:
    """Ranks whose gradients were alike before they multiplied them.

    It is None if these differed, or nobody knows.
    """
    for one in parted:
        first, *others = sorted(one.snapshots)
        for name in one.names:
            for rank in others:
                found = _multiplied(one, name, first, rank)
                if found is not None:
                    return found
    return None


def _multiplied(
    parted: Parted, name: str, first: int, second: int
) -> MultipliedApart | None:
    mine, theirs = parted.snapshots[first], parted.snapshots[second]
    a, b = mine.factors.get(name), theirs.factors.get(name)
    gradient, other = mine.gradients.get(name), theirs.gradients.get(name)
    if (
        a is None
        or b is None
        or gradient is None
        or other is None
        or not a.number
        or not b.number
    ):
        return None
    if abs(a.number - b.number) <= _CLOSE * abs(a.number):
        return None
    if not gradient.divided_by(a.number).is_close_to(other.divided_by(b.number)):
        return None
    return MultipliedApart(parted.step, (first, second), (a, b))
