"""Rates that are numbers while a CUDA graph captures a step.

They are other numbers when the graph runs again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import (
    Facts,
    has_step_of_torch,
    members_of,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_ENOUGH = 2  # replays
# What schedules change.
_NAMES = ("lr", "momentum", "dampening", "weight_decay", "betas", "alpha", "lr_decay")


class _Rate(NamedTuple):
    """A number in the settings of a group: of several, as `betas` has, which one."""

    group: int
    name: str
    which: int


@final
@dataclass
class _Captured:
    """A step in a graph.

    Attributes:
        optimizer: Whose step it is.
        place: Where it was captured.
        rates: The learning rates, decays and so on of its groups then, of those that
            are numbers.
        replays: How often the graph has run with other ones.
        rate: The name of one of them, what it was, and what it was in the last of
            these.
        replayed_at: Where that was.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    place: Place
    rates: dict[_Rate, float]
    replays: int = 0
    rate: tuple[str, float, float] = ("lr", 0.0, 0.0)
    replayed_at: Place | None = None


@final
class CapturedRates(Lint):
    """Looks for schedules that change a number in a captured step.

    A graph has the number of the capture.
    """

    def __init__(self) -> None:
        self._capturing: dict[int, Any] = {}  # by rank, the graph
        self._steps: Objects[Any, list[_Captured]] = Objects()
        self._all: list[_Captured] = []

    @override
    def captures(self, facts: Facts, graph: Any, is_over: bool) -> None:
        if is_over:
            self._capturing.pop(facts.rank, None)
        else:
            self._capturing[facts.rank] = graph
            self._steps.pop(graph, None)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        graph = self._capturing.get(facts.rank)
        if graph is not None and (rates := _rates_of(optimizer)):
            captured = _Captured(weakref.ref(optimizer), here(), rates)
            self._steps.setdefault(graph, []).append(captured)
            self._all.append(captured)

    @override
    def replayed(self, facts: Facts, graph: Any) -> None:
        for captured in self._steps.get(graph, ()):
            optimizer = captured.optimizer()
            now = {} if optimizer is None else _rates_of(optimizer)
            other = [
                (_name_of(at), rate, now[at])
                for at, rate in captured.rates.items()
                if now.get(at, rate) != rate
            ]
            if other:
                captured.replays += 1
                captured.rate, captured.replayed_at = other[0], here()

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[Place, Finding | None] = {}
        for one in self._all:
            if one.replays >= _ENOUGH and one.replayed_at is not None:
                found.setdefault(one.place, _finding(one, one.replayed_at))
        return list(found.values())


def _rates_of(optimizer: torch.optim.Optimizer) -> dict[_Rate, float]:
    """The settings of groups that are numbers.

    The kernels of a graph read those in tensors.
    """
    if not has_step_of_torch(optimizer):
        return {}  # it may write them into a tensor before a graph runs
    trained = {
        at: group
        for at, group in enumerate(optimizer.param_groups)
        if any(
            parameter.grad is not None or parameter.requires_grad
            for parameter in members_of(group)
        )
    }
    rates: dict[_Rate, float] = {}
    for at, group in trained.items():
        for name, value in group.items():
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            for which, number in enumerate(numbers if name in _NAMES else ()):
                if isinstance(number, (int, float)):
                    rates[_Rate(at, name, which)] = float(number)
    return rates


def _name_of(rate: _Rate) -> str:
    return f"{rate.name}[{rate.which}]" if rate.name == "betas" else rate.name


def _finding(captured: _Captured, replayed_at: Place) -> Finding | None:
    name, before, now = captured.rate
    write = (
        "Make the learning rate a tensor, `lr=torch.tensor(0.01, device=device)` with "
        "`capturable=True`: a scheduler writes into it, and the graph reads it."
    )
    if name != "lr":
        write = (
            "Capture the graph again after you have changed it, or leave the step out "
            "of the graph."
        )
    return finding(
        "rate-in-a-graph",
        f"A CUDA graph has captured `optimizer.step()` ({captured.place}) with "
        f"{name}={before:g}. It ran {captured.replays} times ({replayed_at}) after "
        f"{name} was changed, to {now:g} in the last: it still uses {before:g}.",
        write,
        [captured.place, replayed_at],
    )
