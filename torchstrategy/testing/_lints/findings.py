"""What lints have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torchstrategy.testing._lints.evidence.places import Place, in_words


@final
@dataclass(frozen=True)
class Finding:
    """A mistake that a program seems to make, found by watching it run.

    Example:
        >>> with torchstrategy.testing.lint_training(check=False) as record:
        ...     pass  # train
        >>> [(finding.name, finding.lines) for finding in record.findings]
        []
    """

    name: str
    """What silences it, as a comment on one of its lines.

    Write `# torchstrategy: ignore[name]`.
    """
    says: str
    """What was seen, with numbers and lines."""
    write: str
    """What to write in its place."""
    lines: tuple[str, ...]
    """The lines of the program that it is about, such as `train.py:31`."""

    def __str__(self) -> str:
        return f"{self.name}: {self.says} {self.write}"

    def as_json(self) -> dict[str, Any]:
        """The same for other programs."""
        return {
            "name": self.name,
            "says": self.says,
            "write": self.write,
            "lines": list(self.lines),
        }


def finding(name: str, says: str, write: str, places: list[Place]) -> Finding | None:
    """A finding; None if a comment on one of its lines silences it."""
    if any(place.silences(name) for place in places):
        return None
    lines = in_words(places)
    return Finding(name, says, write, tuple(lines.split(", ")) if lines else ())


def some(names: list[str], shown: int = 3) -> str:
    """Some of several names: `a, b, c and 4 more`."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed_ranks(ranks)}"


def listed_ranks(ranks: Sequence[int]) -> str:
    """`1, 2`."""
    return ", ".join(map(str, ranks))
