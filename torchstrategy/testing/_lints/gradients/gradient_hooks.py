"""Hooks of gradients (`register_comm_hook`) whose result is no mean over ranks."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read, numbers_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.means.scales import (
    accumulated,
    factor_of,
    factor_of_gradients,
)
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_MOST_CALLS, _MOST_NUMBERS = 6, 4096
_ENOUGH_STEPS = 2
# Of the whole bucket: eight bits of bfloat16 are 0.004, and some hooks send fewer.
_ROUNDING = 0.03
_SAME = 0.01  # a number by which hooks multiply is the same in all steps
_OTHER = 0.05  # what is no mean


@dataclass(eq=False)
class _Call:
    """A call of a hook, as one rank has made it.

    Attributes:
        step: How many steps the rank has made before.
        gives: Some numbers of the bucket.
        gets: The same of what the hook has returned.
        is_of_means: Whether the gradients are those of a mean, and nothing has divided
            them later.
    """

    step: int
    gives: torch.Tensor
    gets: torch.Tensor | None = None
    is_of_means: bool = False


@dataclass(eq=False)
class _Hook:
    """The hook of a model, in all ranks."""

    place: Place
    ranks: tuple[int, ...]
    calls: dict[int, list[_Call]]


@final
class GradientHooks(Lint):
    """Compares what hooks return with the mean of what the ranks have given them.

    It does so for one bucket of the first steps.

    Only where losses are means, and nothing else divides: the sum is right for a loss
    that is divided by all rows.
    """

    def __init__(self) -> None:
        self._hooks: dict[Any, _Hook] = {}

    @override
    def hooked(
        self, facts: Facts, model: Any, place: Place, given: torch.Tensor, future: Any
    ) -> None:
        known = next((one for one in facts.models if one.model() is model), None)
        if known is None or len(known.ranks) < 2:
            return
        hook = self._hooks.setdefault(
            (known.key, place), _Hook(place, known.ranks, defaultdict(list))
        )
        call = _Call(facts.steps, given)
        hook.calls[facts.rank].append(call)
        future.add_done_callback(functools.partial(_done, call))

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        of_step = [
            call
            for hook in self._hooks.values()
            for call in hook.calls[facts.rank]
            if call.step == facts.steps
        ]
        if not of_step:
            return
        calls = [call for call in facts.backwards if call.is_plain]
        several = accumulated(calls)
        if several or len(calls) == 1:
            together = several or calls
            loss, gradient = factor_of(together), factor_of_gradients(facts, together)
            is_of_means = (
                loss is not None
                and gradient is not None
                and _is(loss * gradient * len(together), 1, 1e-6)
            )
            for call in of_step:
                call.is_of_means = is_of_means

    @override
    def findings(self) -> list[Finding | None]:
        return [
            _finding(hook, factor)
            for hook in self._hooks.values()
            if (factor := _factor(hook)) is not None
        ]


def _finding(hook: _Hook, factor: float) -> Finding | None:
    ranks = len(hook.ranks)
    of = f"{ranks} ranks have given it"
    if _is(factor, ranks, _SAME):
        what, write = (
            f"the sum of what {of}, and not the mean",
            "Divide by the number of ranks, before the all_reduce",
        )
    elif _is(factor, 1 / ranks, _SAME):
        what, write = (
            f"the mean of what {of}, divided by {ranks} once more",
            "Leave one of the two divisions away",
        )
    else:
        times = f"{factor:.1f}" if abs(factor) >= 1 else f"{factor:.3g}"
        what, write = f"about {times} times the mean of what {of}", "Return the mean"
    return finding(
        "hook-is-no-mean",
        f"The hook that `register_comm_hook` was given ({hook.place}) returns {what}. "
        "DistributedDataParallel does not divide what a hook returns.",
        f"{write}: `buffer.div_(dist.get_world_size())`."
        if "Divide" in write
        else f"{write}.",
        [hook.place],
    )


def _factor(hook: _Hook) -> float | None:
    """By what the mean is multiplied in all calls; None if that is no number, or 1."""
    factors, steps = [], set()
    if any(not hook.calls.get(rank) for rank in hook.ranks):
        return None
    for calls in zip(*(hook.calls[rank] for rank in hook.ranks), strict=False):
        factor = _factor_of(calls)
        if factor is None:
            return None
        if factor:
            factors.append(factor)
            steps.add(calls[0].step)
    if len(steps) < _ENOUGH_STEPS or not all(
        _is(factor, factors[0], _SAME) for factor in factors
    ):
        return None
    return None if _is(factors[0], 1, _OTHER) else factors[0]


def _factor_of(calls: tuple[_Call, ...]) -> float | None:
    """The same of one call; 0 if all gradients are zeros, None if nobody can say."""
    if not all(call.is_of_means and call.gets is not None for call in calls):
        return None
    with torch.no_grad(), unwatched(), without_modes():
        if len({call.gives.shape for call in calls}) > 1:
            return None
        mean = torch.stack([call.gives for call in calls]).mean(0)
        size = float(mean.square().sum())
        gets = calls[0].gets
        if not size:
            return 0.0
        if gets is None or gets.shape != mean.shape:
            return None
        factor = float((gets * mean).sum()) / size
        left = float((gets - factor * mean).square().sum()) ** 0.5
        return factor if left <= _ROUNDING * abs(factor) * size**0.5 else None


def _done(call: _Call, future: Any) -> None:
    """The hook has its result. It is a tensor, or a list of one."""
    value = future.value()
    result = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(result, torch.Tensor) and can_be_read(result):
        call.gets = _some(result)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of some numbers of a tensor."""
    here = numbers_of(tensor)
    with torch.no_grad(), unwatched(), without_modes():
        flat = here.view(-1)
        return flat[:: max(1, flat.numel() // _MOST_NUMBERS)].double().cpu().clone()


def _is(number: float, expected: float, rounding: float) -> bool:
    return abs(number - expected) <= rounding * abs(expected)


def replaced(tell: Callable[..., None]) -> list[tuple[Any, str, Any]]:
    """What tells of hooks, in place of a method of torch."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def registering(model: Any, state: Any, hook: Callable[..., Any]) -> Any:
        place, there, calls = here(), weakref.ref(model), itertools.count()

        @functools.wraps(hook)
        def told(state: Any, bucket: Any) -> Any:
            buffer = bucket.buffer()
            if bucket.index() or next(calls) >= _MOST_CALLS or not can_be_read(buffer):
                return hook(state, bucket)
            given = _some(buffer)  # most hooks write on it
            future = hook(state, bucket)
            tell("hooked", there(), place, given, future)
            return future

        return register(model, state, told if hasattr(hook, "__qualname__") else hook)

    return [(DistributedDataParallel, "register_comm_hook", registering)]
