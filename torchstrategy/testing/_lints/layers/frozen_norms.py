"""Batch norm of a frozen part that is in training mode, and changes statistics."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import (
    Fingerprint,
    can_be_read,
    fingerprint,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.known import Known
from torchstrategy.testing._lints.evidence.modules import (
    WRAPPER,
    living_modules,
    modules_in,
    parameters_in,
)
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.layers.batch_norm import BATCH_NORMS
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import BatchNorm, without_modes
from torchstrategy.testing._simulation.program import unwatched

# After so many steps with such a layer: weights that stay the same are no average.
_FIRST_LOOK, _SECOND_LOOK = 2, 4
_CLOSE = 1e-4
_aten = torch.ops.aten


class _Part(NamedTuple):
    """A frozen layer, and what was frozen before it: parameters, and what they were."""

    name: str
    frozen: list[weakref.ref[torch.Tensor]]
    values: list[Fingerprint | None]


@final
@dataclass
class _Norm:
    """A layer of batch norm in training mode, by its running mean.

    Attributes:
        mean: Its running mean.
        place: Where it is called.
        channels: How many channels it has.
        is_used: Whether it, or what is before it, is trained, or its statistics began
            as those of a new layer.
        steps: How many steps were made after it was called, frozen.
        steps_at: Where the last one was made.
        part: The layer and what is before it, after the first look.
        is_found: Whether all of that has stayed as it was until the second look.
    """

    mean: weakref.ref[torch.Tensor]
    place: Place
    channels: int
    is_used: bool = False
    steps: int = 0
    steps_at: Place | None = None
    part: _Part | None = None
    is_found: bool = False


@final
class FrozenNorms(Lint):
    """Looks for batch norm in training mode that is frozen from the beginning.

    All that it gets its input from is frozen, too.

    What gets its input from a part that is trained may have to follow it. So may the
    discriminator of a generator, which is frozen in turns, and a slow copy whose
    weights are averages.
    """

    def __init__(self) -> None:
        self._norms: dict[int, Known[_Norm]] = defaultdict(Known)
        # By rank and id, since the last step.
        self._called: dict[int, dict[int, _Norm]] = defaultdict(dict)
        self._all: list[_Norm] = []
        self._found: dict[int, _Norm] = {}  # by the id of the layer

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(BATCH_NORMS, self._normalizes)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        called = self._called.pop(facts.rank, {})
        for norm in called.values():
            if norm.is_used:
                continue
            norm.steps += 1
            norm.steps_at = here()
            if norm.steps == _FIRST_LOOK:
                self._look(norm)
            elif (
                norm.part is not None
                and norm.steps >= _SECOND_LOOK
                and not norm.steps & (norm.steps - 1)
            ):
                norm.is_found = _values_of(norm.part.frozen) == norm.part.values
                norm.is_used = not norm.is_found

    def has_found(self, layer: int) -> bool:
        """Whether it has found a layer, by its id."""
        norm = self._found.get(layer)
        return norm is not None and norm.is_found and not norm.is_used

    @override
    def findings(self) -> list[Finding | None]:
        by_place: dict[Place, list[_Norm]] = defaultdict(list)
        for norm in self._all:
            if norm.is_found and not norm.is_used:
                by_place[norm.place].append(norm)
        return [_finding(norms) for norms in by_place.values()]

    def _normalizes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        inputs, weight, bias, mean, _, is_training, momentum = args[:7]
        if (
            not is_training
            or mean is None
            or not momentum
            or not torch.is_grad_enabled()
        ):
            return
        known = self._norms[facts.rank]
        norm = known.get(mean)
        is_trained = inputs.requires_grad or any(
            one is not None and one.requires_grad for one in (weight, bias)
        )
        if norm is None:
            norm = _Norm(weakref.ref(mean), Place("", 0), mean.numel())
            norm.is_used = (
                is_trained
                or weight is None
                or not can_be_read(mean)
                or _is_new(mean, result[1], momentum)
            )
            known.put(mean, norm)
            if not norm.is_used:
                norm.place = here()
                self._all.append(norm)
        norm.is_used = norm.is_used or is_trained
        if not norm.is_used:
            self._called[facts.rank][id(norm)] = norm

    def _look(self, norm: _Norm) -> None:
        mean = norm.mean()
        modules = list(living_modules())
        layer = next(
            (
                one
                for one in modules
                if isinstance(one, BatchNorm) and one.running_mean is mean
            ),
            None,
        )
        before = None if layer is None else _frozen_before(layer, modules)
        if layer is None or before is None:
            norm.is_used = True
            return
        name = max(
            (
                name
                for one in modules
                for name, other in modules_in(one)
                if other is layer
            ),
            key=len,
        )
        frozen: list[weakref.ref[torch.Tensor]] = [
            weakref.ref(parameter) for parameter in before
        ]
        norm.part = _Part(name.removeprefix(WRAPPER), frozen, _values_of(frozen))
        self._found[id(layer)] = norm


def _frozen_before(
    layer: nn.Module, modules: Sequence[nn.Module]
) -> list[nn.Parameter] | None:
    """The parameters of a layer and those before it; None if some train.

    They are in the smallest module with weights there.
    """
    smallest: list[nn.Parameter] | None = None
    size = 0
    for module in modules:
        parameters = parameters_in(module)
        at = next((at for at, one in enumerate(parameters) if one is layer.weight), 0)
        # A norm before it has none.
        has_weights = any(one.dim() > 1 for one in parameters[:at])
        if has_weights and (smallest is None or len(parameters) < size):
            smallest, size = [*parameters[:at], *parameters_in(layer)], len(parameters)
    return (
        None
        if smallest is None or any(one.requires_grad for one in smallest)
        else smallest
    )


def _values_of(
    parameters: Sequence[weakref.ref[torch.Tensor]],
) -> list[Fingerprint | None]:
    return [fingerprint(parameter()) for parameter in parameters]


def _is_new(mean: torch.Tensor, batch: torch.Tensor, momentum: float) -> bool:
    """Whether the running mean was 0, as in a new layer.

    That is before it got its share of the mean of a batch.
    """
    if not can_be_read(batch) or momentum >= 1:
        return True
    now, its = numbers_of(mean), numbers_of(batch)
    with unwatched(), without_modes():
        expected = its.double() * momentum
        return bool(
            (now.double() - expected).abs().max()
            <= _CLOSE * (expected.abs().max() + _CLOSE)
        )


def _finding(norms: Sequence[_Norm]) -> Finding | None:
    first = norms[0]
    assert first.steps_at is not None  # it has made steps
    names = list(
        dict.fromkeys(f"{norm.part.name}" for norm in norms if norm.part is not None)
    )
    is_one = len(names) == 1
    return finding(
        "frozen-norm-in-training",
        f"{some(names)} {'is' if is_one else 'are'} frozen, as all weights before "
        f"{'it' if is_one else 'them'}, but in training mode: each call "
        f"({first.place}) changes the running statistics, and normalizes with those of "
        f"the batch. That was so in {first.steps} steps ({first.steps_at}). Evaluation "
        "uses other statistics than the part was frozen with.",
        "Call `.eval()` on the frozen part after each `model.train()`: that puts all "
        "parts into training mode.",
        [first.place, first.steps_at],
    )
