"""Schedulers that lower the learning rate by another metric on each rank."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute
from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.modules import parameters_in
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_CLOSE = 1e-6
_MOST = 1000  # metrics of a scheduler


class _Metric(NamedTuple):
    place: Place
    number: float
    ranks: tuple[int, ...]  # that train the same parameters


@final
class Metrics(Lint):
    """Compares the metrics that `ReduceLROnPlateau` gets on ranks.

    The optimizers of these ranks train one model.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, Objects[Any, int]] = defaultdict(Objects)
        # By rank and scheduler.
        self._counts: dict[tuple[int, int], int] = defaultdict(int)
        # By scheduler and turn, by rank.
        self._metrics: dict[tuple[int, int], dict[int, _Metric]] = defaultdict(dict)

    @override
    def measured(self, facts: Facts, scheduler: Any, metric: Any) -> None:
        number = number_of(metric)
        optimizer = attribute(scheduler, "optimizer")
        ranks = (
            _ranks_of(facts, optimizer)
            if isinstance(optimizer, torch.optim.Optimizer)
            else ()
        )
        if len(ranks) < 2 or number is None:
            return
        known = self._numbers[facts.rank]
        which = known.setdefault(scheduler, len(known))
        turn = self._counts[facts.rank, which]
        self._counts[facts.rank, which] += 1
        if turn < _MOST:
            self._metrics[which, turn][facts.rank] = _Metric(here(), number, ranks)

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[Place, Finding | None] = {}
        for (_, turn), by_rank in self._metrics.items():
            first, one = min(by_rank.items())
            for rank, other in by_rank.items():
                if (
                    other.ranks == one.ranks
                    and rank in one.ranks
                    and not _are_close(one.number, other.number)
                ):
                    found.setdefault(one.place, _finding(turn, one, first, other, rank))
        return list(found.values())


def _ranks_of(facts: Facts, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """The ranks that have copies of what an optimizer trains.

    They have them by `DistributedDataParallel`; there may be none.
    """
    own = set(map(id, parameters_of(optimizer)))
    for model in facts.models:
        wrapped = model.model()
        if wrapped is not None and not own.isdisjoint(map(id, parameters_in(wrapped))):
            return model.ranks
    return ()


def _are_close(one: float, other: float) -> bool:
    both_are_nan = math.isnan(one) and math.isnan(other)
    return both_are_nan or math.isclose(one, other, rel_tol=_CLOSE)


def _finding(
    turn: int, one: _Metric, first: int, other: _Metric, rank: int
) -> Finding | None:
    return finding(
        "metric-of-one-rank",
        f"`ReduceLROnPlateau.step` at {one.place} gets a metric that differs between "
        f"ranks which train one model: in call {turn + 1}, {one.number:.6g} on rank "
        f"{first} and {other.number:.6g} on rank {rank}. Their learning rates part as "
        "soon as one of them sees a plateau.",
        "Give all ranks the metric of all rows: `dist.all_reduce` of sums and counts. "
        "`dist.reduce` gives the sum to `dst` alone.",
        list(dict.fromkeys([one.place, other.place])),
    )
