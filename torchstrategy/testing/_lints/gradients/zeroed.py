"""Gradients that are set to zero, or to None, before anything has read them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy._base.torch_internals import have_gradient_hooks
from torchstrategy.testing._lints.evidence.facts import Facts, address_of, tensors_in
from torchstrategy.testing._lints.evidence.fingerprints import is_zero
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.losses import leaves_of
from torchstrategy.testing._lints.evidence.places import (
    CLIPPING,
    Place,
    here,
    is_within,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower
from torchstrategy.testing._lints.torch_internals import held_here

_ENOUGH_STEPS = 3
_MOST_CALLS = 1000  # without a step
_aten = torch.ops.aten
_ZEROES = (_aten.zero_.default, _aten._foreach_zero_.default)


@final
@dataclass
class _Call:
    """A call of `backward`.

    Attributes:
        way: Through which lines.
        changed: The parameters, by id, whose gradients it has changed.
        first: One of them, and the version of its gradient.
        gradients: The gradients, by their address, if it is watched what reads them.
        is_lost: Whether all of them are gone before the next call, or before the step.
        is_read: Whether an operator has read one of them, or the program keeps one.
        is_written: Whether the program has put others in their place.
    """

    way: tuple[Place, ...]
    changed: set[int]
    first: tuple[weakref.ref[torch.Tensor], int]
    gradients: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    is_lost: bool = False
    is_read: bool = False
    is_written: bool = False


class _Kind(NamedTuple):
    """What the calls of `backward` between two steps were like."""

    way: tuple[Place, ...]
    calls: int
    is_last_lost: bool


@final
@dataclass
class _Seen:
    """What is known of a rank.

    Attributes:
        calls: The calls of `backward` since the last step.
        kind: What they were like before each of the last steps.
        count: How many steps in a row this is so.
        zeroed_at: Where gradients were zeroed last.
        is_back: Whether `backward` runs.
        is_over: Whether it is known what this rank does: gradients are used, or it was
            found.
    """

    calls: list[_Call] = field(default_factory=list)
    kind: _Kind | None = None
    count: int = 0
    zeroed_at: Place | None = None
    is_back: bool = False
    is_over: bool = False

    @property
    def is_suspicious(self) -> bool:
        """Whether the next step decides.

        So it is watched who reads gradients until then.
        """
        return self.count == _ENOUGH_STEPS - 1 and not self.is_over


class _Found(NamedTuple):
    kind: _Kind
    steps_at: Place
    zeroed_at: Place | None


@final
class Zeroed(Follower):
    """Looks for steps before which gradients of the same lines are thrown away.

    There are as many of them before each step.

    Some programs throw gradients away on purpose: a generator's after the step of the
    discriminator, those of a batch that is skipped, those of an attack that needs the
    gradient of its input alone. They do so on a line of its own, with a step in
    between, or now and then, or have an input with a gradient. Others read gradients
    first.
    """

    def __init__(self) -> None:
        self._pieces = {}  # the ranks where it is watched who reads gradients
        self._seen: dict[int, _Seen] = defaultdict(_Seen)
        self._found: dict[_Kind, _Found] = {}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        seen = self._seen[facts.rank]
        if facts.stepping is not None or seen.is_over:
            return
        seen.is_back = True
        self._end_of_call(facts, seen)
        if seen.is_suspicious and any(
            _has_other_leaves(facts, loss) for loss in losses
        ):
            seen.is_over = True

    @override
    def went_back(self, facts: Facts) -> None:
        seen = self._seen[facts.rank]
        seen.is_back = False
        seen.is_over |= len(seen.calls) >= _MOST_CALLS
        if facts.stepping is not None or seen.is_over or not facts.backwards:
            return
        changed = facts.backwards[-1].changed
        first = next(
            (
                one
                for one in facts.parameters()
                if id(one) in changed and one.grad is not None
            ),
            None,
        )
        if first is None or first.grad is None:
            return
        call = _Call(
            facts.backwards[-1].way,
            changed,
            (weakref.ref(first), version_of(first.grad)),
        )
        if seen.is_suspicious:
            for parameter in facts.parameters():
                if id(parameter) in changed and parameter.grad is not None:
                    call.gradients[address_of(held_here(parameter.grad))] = weakref.ref(
                        parameter.grad
                    )
                    call.is_read |= have_gradient_hooks([parameter])
            self._pieces[facts.rank] = call
        seen.calls.append(call)

    @override
    def zeroed(self, facts: Facts) -> None:
        if self._seen[facts.rank].is_suspicious:
            self._seen[facts.rank].zeroed_at = here()

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        call: _Call = self._pieces[facts.rank]
        if call.is_read or func in _ZEROES:
            return
        for position, tensor in enumerate(tensors_in((*args, *kwargs.values()))):
            gradient = call.gradients.get(address_of(held_here(tensor)))
            if gradient is None or gradient() is None or is_within(CLIPPING):
                continue
            call.is_read = True
            call.is_written |= func is _aten.copy_.default and position == 0
            return

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen[facts.rank]
        if seen.is_over or not seen.calls:
            return
        if seen.is_back:  # a hook makes steps while `backward` runs
            seen.is_over = True
            return
        self._end_of_call(facts, seen)
        calls, was_suspicious = seen.calls, seen.is_suspicious
        seen.calls = []
        kind = _kind_of(calls)
        seen.count = (
            seen.count + 1
            if kind is not None and kind == seen.kind
            else int(kind is not None)
        )
        seen.kind = kind
        if kind is None or not was_suspicious:
            return
        seen.is_over = True
        is_used = calls[-1].is_written or any(
            call.is_read for call in calls if call.is_lost
        )
        if seen.count >= _ENOUGH_STEPS and not is_used:
            self._found.setdefault(kind, _Found(kind, here(), seen.zeroed_at))

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(found) for found in self._found.values()]

    def _end_of_call(self, facts: Facts, seen: _Seen) -> None:
        """The gradients of the last call are used no more, or are added to."""
        self._pieces.pop(facts.rank, None)
        if not seen.calls:
            return
        call = seen.calls[-1]
        call.is_lost = _is_lost(facts, call)
        for parameter in facts.parameters() if call.gradients else ():
            if id(parameter) not in call.changed:
                continue
            own = call.gradients.pop(address_of(held_here(parameter.grad)), None)
            call.is_written |= parameter.grad is not None and (
                own is None or own() is not parameter.grad
            )
        # Those that are left are in no parameter any more.
        call.is_read |= any(
            gradient() is not None for gradient in call.gradients.values()
        )


def _is_lost(facts: Facts, call: _Call) -> bool:
    there, version = call.first
    first = there()
    if first is None or (first.grad is not None and version_of(first.grad) == version):
        return False  # as nearly always: there is no need to look at the others
    gradients = [one.grad for one in facts.parameters() if id(one) in call.changed]
    return all(gradient is None or is_zero(gradient) for gradient in gradients)


def _has_other_leaves(facts: Facts, loss: torch.Tensor) -> bool:
    """Whether a loss has a gradient for what is no parameter, such as an input.

    An attack has such an input.
    """
    owned = {id(parameter) for parameter in facts.parameters()}
    return any(
        not isinstance(leaf, nn.Parameter) and id(leaf) not in owned
        for leaf in leaves_of(loss)
    )


def _kind_of(calls: Sequence[_Call]) -> _Kind | None:
    """What calls are like; None if gradients are used, or calls are of many kinds."""
    last = calls[-1]
    is_alike = all(call.way == last.way and call.is_lost for call in calls[:-1])
    if not is_alike or (len(calls) == 1 and not last.is_lost):
        return None
    return _Kind(last.way, len(calls), last.is_lost)


def _finding(found: _Found) -> Finding | None:
    kind, zeroed = (
        found.kind,
        "" if found.zeroed_at is None else f" ({found.zeroed_at})",
    )
    places = [
        kind.way[0],
        *([] if found.zeroed_at is None else [found.zeroed_at]),
        found.steps_at,
    ]
    if kind.is_last_lost:
        return finding(
            "gradient-thrown-away",
            f"All gradients of `backward` ({kind.way[0]}) are set to zero{zeroed} "
            f"before the step of the optimizer ({found.steps_at}), in {_ENOUGH_STEPS} "
            "steps in a row, and nothing has read them: nothing is trained.",
            "Call `zero_grad()` before `backward` or after `optimizer.step()`, and not "
            "in between.",
            places,
        )
    return finding(
        "gradient-thrown-away",
        f"`backward` is called {kind.calls} times ({kind.way[0]}) before each step of "
        f"the optimizer ({found.steps_at}). All gradients but those of the last call "
        f"are set to zero{zeroed}, and nothing has read them: each step is of one "
        "micro-batch.",
        "Call `zero_grad()` once for each step: after `optimizer.step()`, or before "
        "the first micro-batch.",
        places,
    )
