"""Rows of an evaluation that count twice.

A `DistributedSampler` gives all ranks the same number of rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute, length_of, number_in
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import few_numbers
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._ranks.witnesses import Told

_FEWEST_ROWS = 5  # of a rank: smaller numbers are often something else


class _Padded(NamedTuple):
    """An evaluation, as its sampler says.

    Attributes:
        place: Where.
        rows: How many rows the rank gets.
        given: How many all ranks get.
        size: How many there are.
        ranks: Among how many ranks they are divided.
    """

    place: Place
    rows: int
    given: int
    size: int
    ranks: int


@final
@dataclass
class _Open:
    """An evaluation that a rank reads, and how many rows it has got so far."""

    loader: Any
    padded: _Padded
    rows: int = 0


class _Case(NamedTuple):
    padded: _Padded
    # Of those that are reduced: the number of the tensor, and that within it.
    number: tuple[int, int]
    place: Place


@final
class Padding(Lint):
    """Looks for sums of the numbers of rows, over all ranks, of padded samplers.

    The ranks that have padding may leave it out of their number. So each rank has to
    give all of its rows.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        # Since the last `backward`.
        self._padded: dict[int, list[_Padded]] = defaultdict(list)
        # By collective and rank.
        self._given: dict[Hashable, dict[int, list[_Case]]] = defaultdict(dict)
        self._found: dict[tuple[Place, Place], _Case] = {}

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        self._open.pop(facts.rank, None)
        sampler = attribute(loader, "sampler")
        if facts.size > 1 and isinstance(sampler, DistributedSampler):
            padded = _padded(sampler)
            if padded is not None and padded.given > padded.size:
                self._open[facts.rank] = _Open(loader, padded)

    @override
    def drew(self, facts: Facts, loader: Any, rows: Any) -> None:
        there = self._open.get(facts.rank)
        if there is None or there.loader is not loader:
            return
        if rows is not None:
            there.rows += len(rows) if isinstance(rows, (list, tuple)) else 1
            return
        del self._open[facts.rank]
        if there.rows == there.padded.rows >= _FEWEST_ROWS:
            self._padded[facts.rank].append(there.padded)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._open.pop(facts.rank, None)
        self._padded.pop(facts.rank, None)

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        evaluations = self._padded.get(facts.rank)
        if (
            not evaluations
            or is_of_torch
            or told.kind != "all_reduce"
            or told.detail != "sum"
        ):
            return
        cases, place = [], here()
        for number, tensor in enumerate(told.gives):
            numbers = None if tensor.is_complex() else few_numbers(tensor)
            for index, value in enumerate(numbers or []):
                cases += [
                    _Case(padded, (number, index), place)
                    for padded in evaluations
                    if value == padded.rows and padded.ranks == len(told.ranks)
                ]
        if not cases:
            return
        given = self._given[told.key]
        given[facts.rank] = cases
        if len(given) == len(told.ranks):
            for case in _of_all(list(given.values())):
                self._found.setdefault((case.place, case.padded.place), case)
            del self._given[told.key]

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(case) for case in self._found.values()]


def _finding(case: _Case) -> Finding | None:
    padded = case.padded
    more = padded.given - padded.size
    rows = "one row counts" if more == 1 else f"{more} rows count"
    return finding(
        "rows-counted-twice",
        f"The DistributedSampler of the evaluation at {padded.place} gives each of "
        f"{padded.ranks} ranks {padded.rows} rows, and the sum of their numbers "
        f"({case.place}) is {padded.given}, of {padded.size} rows that there are: "
        f"{rows} twice in what you measure.",
        "Evaluate each row once, `Subset(dataset, range(rank, len(dataset), ranks))`, "
        "or cut what you gather to `len(dataset)` rows before you count.",
        [case.place, padded.place],
    )


def _of_all(cases: list[list[_Case]]) -> list[_Case]:
    """Those that all ranks have, at the same number of the tensor."""
    of_ranks = [
        {(case.number, case.padded.given) for case in of_rank} for of_rank in cases
    ]
    common = set.intersection(*of_ranks)
    return [case for case in cases[0] if (case.number, case.padded.given) in common]


def _padded(sampler: Any) -> _Padded | None:
    """What a sampler says of itself; None if it does not say all of it."""
    rows, given, ranks = (
        number_in(sampler, name)
        for name in ("num_samples", "total_size", "num_replicas")
    )
    size = length_of(attribute(sampler, "dataset"))
    if rows is None or given is None or size is None or ranks is None:
        return None
    return _Padded(here(), rows, given, size, ranks)
