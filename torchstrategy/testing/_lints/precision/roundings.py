"""Weights in half the precision whose updates are too small to change them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute, entry_of
from torchstrategy.testing._lints.evidence.facts import (
    Facts,
    has_step_of_torch,
    members_of,
    parameters_of,
)
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    number_of,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.modules import names_of
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import held_here, without_modes
from torchstrategy.testing._simulation.program import unwatched

_HALVES = (torch.bfloat16, torch.float16)
_SKIPPED, _LOOKS = 3, 5  # a momentum grows in the first steps
_MOST = 0.5
_PARAMETERS, _NUMBERS = 64, 512  # how many are looked at, and how many numbers of each
_FLOAT32 = 2.0**-22  # smaller shares of a weight change none in float32, either


class _Share(NamedTuple):
    """Of some numbers that have a gradient, how many a step has left as they were."""

    unchanged: int = 0
    all: int = 0


class _Found(NamedTuple):
    steps_at: Place
    dtype: str
    share: float
    names: list[str]


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        steps: How many steps it has made with a learning rate that did not rise.
        looks: At how many of them the lint has looked.
        rates: The learning rates of the last step.
        before: Some numbers of parameters before the step that it is making.
        shares: What its steps have left as it was, of each parameter.
        is_over: Whether there is nothing more to be looked at.
    """

    steps: int = 0
    looks: int = 0
    rates: list[float] = field(default_factory=list)
    before: Objects[torch.Tensor, torch.Tensor] = field(default_factory=Objects)
    shares: Objects[torch.Tensor, _Share] = field(default_factory=Objects)
    is_over: bool = False


@final
class Roundings(Lint):
    """Compares parameters before and after five steps of an optimizer of torch.

    It compares some numbers of those in bfloat16 or float16.

    Optimizers of others may keep weights in float32, or round at random: they are left
    alone. So is the beginning of a schedule, while the learning rate rises.
    """

    def __init__(self) -> None:
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._found: dict[Place, _Found] = {}

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _Seen()
            seen.is_over = not has_step_of_torch(optimizer) or not _halves(optimizer)
        if seen.is_over:
            return
        seen.before = Objects()
        rates = [
            number_of(entry_of(group, "lr")) or 0.0 for group in optimizer.param_groups
        ]
        rises = not seen.rates or any(
            now > before for now, before in zip(rates, seen.rates, strict=False)
        )
        seen.rates = rates
        if rises or number_of(attribute(optimizer, "found_inf")):
            return
        seen.steps += 1
        if seen.steps > _SKIPPED:
            seen.before.update(
                (parameter, _sample(parameter)) for parameter in _halves(optimizer)
            )

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.get(optimizer)
        if seen is None or seen.is_over or not seen.before:
            return
        rates = _rates_of(optimizer)
        for parameter, before in seen.before.items():
            rate = rates.get(id(parameter))
            if rate is not None:  # otherwise the step has taken it out of the optimizer
                share, last = (
                    _share_of(optimizer, parameter, before, rate),
                    seen.shares.get(parameter, _Share()),
                )
                seen.shares[parameter] = _Share(
                    last.unchanged + share.unchanged, last.all + share.all
                )
        seen.before = Objects()
        seen.looks += 1
        if seen.looks == _LOOKS:
            seen.is_over = True
            self._judge(seen)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "updates-rounded-away",
                f"The optimizer makes its steps ({one.steps_at}) on weights in "
                f"{one.dtype}, of which there are no copies in float32. In {_LOOKS} "
                f"steps, {one.share:.0%} of the elements with a gradient stayed as "
                "they were, since the update was too small for this dtype: "
                f"{some(one.names)}.",
                "Keep the weights in float32 and compute in `torch.autocast(device, "
                f"dtype=torch.{one.dtype})`, or use an optimizer that keeps weights in "
                "float32 or rounds at random.",
                [one.steps_at],
            )
            for one in self._found.values()
        ]

    def _judge(self, seen: _Seen) -> None:
        shares = [
            (parameter, share.unchanged / share.all)
            for parameter, share in seen.shares.items()
            if share.all
        ]
        unchanged = sum(share.unchanged for share in seen.shares.values())
        total = sum(share.all for share in seen.shares.values())
        if not total or unchanged / total <= _MOST:
            return
        shares.sort(key=lambda one: -one[1])
        names = names_of([parameter for parameter, _ in shares])
        place, dtype = here(), str(shares[0][0].dtype).removeprefix("torch.")
        named = [
            f"{name} ({share:.0%})"
            for (_, share), name in zip(shares, names, strict=True)
            if share > _MOST
        ]
        self._found.setdefault(place, _Found(place, dtype, unchanged / total, named))


def _halves(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters in half the precision that can be read; of many, some."""
    found = []
    for parameter in parameters_of(optimizer):
        there = held_here(parameter)
        if (
            parameter.dtype in _HALVES
            and there is not None
            and there.numel()
            and can_be_read(there)
        ):
            found.append(parameter)
    return found[:: max(1, len(found) // _PARAMETERS)]


def _rates_of(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """The learning rate of each parameter, by its id."""
    rates = [
        (group, number_of(entry_of(group, "lr")) or 0.0)
        for group in optimizer.param_groups
    ]
    return {
        id(parameter): rate for group, rate in rates for parameter in members_of(group)
    }


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    there = held_here(tensor)
    assert there is not None
    numbers = numbers_of(there)
    with torch.no_grad(), unwatched(), without_modes():
        flat = numbers.flatten()
        return flat[:: max(1, flat.numel() // _NUMBERS)].double()


def _share_of(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    before: torch.Tensor,
    rate: float,
) -> _Share:
    gradient = held_here(parameter.grad)
    if gradient is None or not can_be_read(gradient):
        return _Share()
    after, slope = _sample(parameter), _sample(gradient)
    if after.shape != before.shape or slope.shape != before.shape:
        return _Share()
    with torch.no_grad(), unwatched(), without_modes():
        size = (
            rate * slope.abs()
            if isinstance(optimizer, torch.optim.SGD)
            else torch.full_like(slope, rate)
        )
        counts = (slope != 0) & slope.isfinite() & (size > _FLOAT32 * before.abs())
        return _Share(int((counts & (after == before)).sum()), int(counts.sum()))
