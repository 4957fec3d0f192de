"""Process groups that ranks make with other members, or in another order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, final

from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint


class _Made(NamedTuple):
    ranks: tuple[int, ...]
    place: Place


@final
class ProcessGroups(Lint):
    """Compares the calls of `new_group`, which all ranks have to make.

    Torch names groups by their number.
    """

    def __init__(self) -> None:
        self._made: dict[int, list[_Made]] = defaultdict(list)

    @override
    def groups(self, facts: Facts, ranks: Sequence[int] | None) -> None:
        members = range(facts.size) if ranks is None else sorted(ranks)
        self._made[facts.rank].append(_Made(tuple(members), here()))

    @override
    def findings(self) -> list[Finding | None]:
        first, *others = sorted(self._made) or [-1]
        for rank in others:
            for number, (own, other) in enumerate(
                zip(self._made[first], self._made[rank], strict=False), 1
            ):
                if own.ranks != other.ranks:
                    return [_finding(number, first, own, rank, other)]
        return []


def _finding(
    number: int, first: int, own: _Made, rank: int, other: _Made
) -> Finding | None:
    return finding(
        "groups-differ",
        f"Call {number} of `dist.new_group` has the ranks {list(own.ranks)} on rank "
        f"{first} ({own.place}) and {list(other.ranks)} on rank {rank} "
        f"({other.place}). torch takes both for one group: on a cluster, this hangs or "
        "adds up the numbers of other ranks.",
        "Make all groups in all processes, in the same order, and keep the one that "
        "has your rank; or `dist.new_group(ranks, use_local_synchronization=True)`.",
        [own.place, other.place],
    )
