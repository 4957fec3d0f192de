"""Schedulers of learning rates, and where they are stepped."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute, entry_of
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.lint import Lint


@dataclass
class Scheduled:
    """What is known of a scheduler.

    Attributes:
        rank: Whose it is.
        optimizer: Its optimizer.
        place: Where it is stepped.
    """

    rank: int
    optimizer: weakref.ref[torch.optim.Optimizer]
    place: Place


Seen = TypeVar("Seen", bound=Scheduled)


class OfSchedulers(Lint, Generic[Seen]):
    """A lint that follows schedulers.

    Args:
        kind: What it notes of each.
    """

    def __init__(self, kind: type[Seen]) -> None:
        self._kind = kind
        self._by_scheduler: Objects[Any, Seen] = Objects()
        self.all: list[Seen] = []

    @override
    def scheduled(self, facts: Facts, scheduler: Any) -> None:
        seen = self._by_scheduler.get(scheduler)
        if seen is None:  # torch steps each once when it is made
            optimizer = attribute(scheduler, "optimizer")
            if not isinstance(optimizer, torch.optim.Optimizer):
                return
            seen = self._kind(facts.rank, weakref.ref(optimizer), here())
            self._by_scheduler[scheduler] = seen
            self.all.append(seen)
        else:
            self.stepped_again(seen, scheduler)

    @abstractmethod
    def stepped_again(self, seen: Seen, scheduler: Any) -> None:
        """A scheduler is stepped, and not by torch when it is made."""


def rates_of(optimizer: torch.optim.Optimizer) -> list[float] | None:
    """The learning rates; None if one is in a tensor.

    A tensor is not read, since that would wait for the device.
    """
    rates = [entry_of(group, "lr") for group in optimizer.param_groups]
    numbers = [float(rate) for rate in rates if isinstance(rate, (int, float))]
    return numbers if numbers and len(numbers) == len(rates) else None
