"""Schedules of the learning rate that count the batches of all ranks.

Each rank has only a part of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute, length_of, number_in
from torchstrategy.testing._lints.evidence.constants import (
    constants_of,
    mentions,
    multiplies,
)
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_HORIZONS = ("T_max", "total_steps", "total_iters")
# A function that uses one may count the steps of all ranks.
_OF_RANKS = ("get_world_size", "WORLD_SIZE")
_ENOUGH = 2  # epochs: a trial of one epoch, of two that are meant, is no mistake


@final
@dataclass
class _Schedule:
    """What is known of a schedule.

    Attributes:
        place: Where it was made.
        kind: Its class.
        horizons: The numbers that may be its length, by name.
        steps: How many it has made.
    """

    place: Place
    kind: str
    horizons: dict[str, int]
    steps: int = 0


@final
@dataclass
class _Epochs:
    """The epochs in which a rank has trained.

    Attributes:
        sizes: For each: how many rows its data set has, how many a batch, and how many
            batches and rows were drawn.
        drawn: The same of the one that has begun; None if there is none.
        is_training: Whether a step was made in that one.
        is_cut: Whether some epoch was left before its end.
    """

    sizes: list[tuple[int, int, int, int]] = field(default_factory=list)
    drawn: tuple[int, int, int, int] | None = None
    is_training: bool = False
    is_cut: bool = False


@final
class Horizons(Lint):
    """Compares how long a schedule is with how many steps a rank has made.

    It has trained to the end.
    """

    def __init__(self) -> None:
        self._schedules: dict[int, Objects[Any, _Schedule]] = defaultdict(Objects)
        self._in_order: dict[int, list[_Schedule]] = defaultdict(list)
        self._epochs: dict[int, _Epochs] = defaultdict(_Epochs)
        self._ranks: dict[int, int] = {}

    @override
    def scheduled(self, facts: Facts, scheduler: Any) -> None:
        known = self._schedules[facts.rank]
        if scheduler not in known:
            horizons = _horizons_of(scheduler) if facts.size > 1 else {}
            if not horizons:
                return
            known[scheduler] = _Schedule(here(), type(scheduler).__name__, horizons)
            self._in_order[facts.rank].append(known[scheduler])
        known[scheduler].steps = number_in(scheduler, "last_epoch") or 0

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        epochs = self._epochs[facts.rank]
        epochs.is_cut = epochs.is_cut or (
            epochs.is_training and epochs.drawn is not None
        )
        epochs.drawn, epochs.is_training = None, False
        batch, size = (
            number_in(loader.batch_sampler, "batch_size"),
            length_of(loader.dataset),
        )
        if batch is not None and size is not None:
            epochs.drawn = size, batch, 0, 0

    @override
    def drew(self, facts: Facts, loader: Any, rows: Any) -> None:
        epochs = self._epochs[facts.rank]
        if epochs.drawn is None:
            return
        if rows is not None:
            size, batch, batches, drawn = epochs.drawn
            epochs.drawn = (
                size,
                batch,
                batches + 1,
                drawn + (len(rows) if isinstance(rows, (list, tuple)) else 1),
            )
        else:
            if epochs.is_training:
                epochs.sizes.append(epochs.drawn)
            epochs.drawn, epochs.is_training = None, False

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._epochs[facts.rank].is_training = True
        self._ranks[facts.rank] = max(
            len(facts.companions()), self._ranks.get(facts.rank, 1)
        )

    @override
    def findings(self) -> list[Finding | None]:
        rank = min(self._in_order, default=0)
        epochs, ranks = self._epochs[rank], self._ranks.get(rank, 1)
        is_cut = epochs.is_cut or (epochs.is_training and epochs.drawn is not None)
        if (
            is_cut
            or ranks < 2
            or len(epochs.sizes) < _ENOUGH
            or len(set(epochs.sizes)) > 1
        ):
            return []
        size, batch, batches, rows = epochs.sizes[0]
        # Its sampler does not divide the rows.
        if abs(rows * ranks - size) >= batch * ranks:
            return []
        found = []
        for schedule in self._in_order[rank]:
            counts = _counts_of_all(schedule, len(epochs.sizes), size, batch, batches)
            names = [
                name for name, number in schedule.horizons.items() if number in counts
            ]
            numbers = schedule.horizons.values()
            if names and not (
                len(numbers) > 1 and {ranks, schedule.steps} & {*numbers}
            ):  # it may divide by the ranks
                found.append(
                    _finding(
                        schedule,
                        names[0],
                        len(epochs.sizes),
                        -(-size // batch),
                        batches,
                        ranks,
                    )
                )
        return found


def _horizons_of(scheduler: Any) -> dict[str, int]:
    """The numbers that may be the length of a schedule, by name."""
    for name in _HORIZONS:
        if (number := number_in(scheduler, name)) is not None:
            return {name: number}
    functions = attribute(scheduler, "lr_lambdas")
    functions = functions if isinstance(functions, list) else []
    if any(
        mentions(function, *_OF_RANKS) or multiplies(function) for function in functions
    ):
        return {}
    return {
        name: number
        for function in functions
        for name, number in constants_of(function).items()
    }


def _counts_of_all(
    schedule: _Schedule, epochs: int, size: int, batch: int, batches: int
) -> set[int]:
    """How long it were if one rank had all rows.

    It is nothing if it was not used for all batches of this rank.
    """
    if schedule.steps < 1 or schedule.steps % epochs:
        return set()
    every = max(1, round(batches / (schedule.steps // epochs)))  # batches in a step
    if schedule.steps // epochs not in (batches // every, -(-batches // every)):
        return set()
    whole = (size // batch, -(-size // batch))
    of_epoch = {number // every for number in whole} | {
        -(-number // every) for number in whole
    }
    counts = {epochs * number for number in of_epoch} | {
        epochs * number // every for number in whole
    }
    return (
        {count for count in counts if count > schedule.steps}
        if batches < min(whole)
        else set()
    )


def _finding(
    schedule: _Schedule, name: str, epochs: int, whole: int, batches: int, ranks: int
) -> Finding | None:
    horizon = schedule.horizons[name]
    return finding(
        "schedule-of-all-ranks",
        f"The {schedule.kind} that is made at {schedule.place} has {name}={horizon}, "
        f"which is for {epochs} epochs of all {whole} batches, and each of {ranks} "
        f"ranks has {batches} of them: training ended after {schedule.steps} of its "
        f"{horizon} steps.",
        "Count with the loader of a rank, `epochs * len(loader)`, and not with "
        "`len(dataset)`.",
        [schedule.place],
    )
