"""Parameters that share memory, and that an optimizer updates one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import entry_of
from torchstrategy.testing._lints.evidence.facts import Facts, address_of, members_of
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read, numbers_of
from torchstrategy.testing._lints.evidence.modules import names_of
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_ENOUGH_LOOKS = 2

Pair = tuple[torch.Tensor, torch.Tensor]


class _Found(NamedTuple):
    steps_at: Place
    names: list[str]
    pairs: int


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        steps: How many steps it has made.
        pairs: The parameters, by id, that shared memory in the last look.
        looks: In how many looks, one after the other, there were some.
    """

    steps: int = 0
    pairs: set[tuple[int, int]] = field(default_factory=set)
    looks: int = 0


@final
class Ties(Lint):
    """Looks for two parameters with common memory and a gradient each.

    They are in one optimizer.

    One parameter under two names is right: autograd adds up its gradients. Parts of one
    large buffer are right, too.
    """

    def __init__(self) -> None:
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._found: dict[Place, _Found] = {}

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.setdefault(optimizer, _Seen())
        seen.steps += 1
        if seen.steps & (seen.steps - 1):  # the first step, and then ever less often
            return
        shared = [
            pair
            for pair in _shared_pairs(_updated(optimizer))
            if not have_one_gradient(*pair)
        ]
        pairs = {(id(first), id(second)) for first, second in shared}
        if not pairs or pairs != seen.pairs:
            seen.looks = 0
        seen.looks += bool(pairs)
        seen.pairs = pairs
        if seen.looks == _ENOUGH_LOOKS:
            place, (first, second) = here(), shared[0]
            self._found.setdefault(
                place, _Found(place, names_of([first, second]), len(shared))
            )

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "parameters-share-memory",
                f"{one.names[0]} and {one.names[1]} are two parameters with the same "
                "memory, and the optimizer updates both in each step "
                f"({one.steps_at}): each with the gradient of its own use alone, and "
                f"not with their sum{_and_others(one.pairs - 1)}.",
                "Give both modules one parameter, as in `head.weight = embed.weight`, "
                "and not its `.data`. Autograd adds up its gradients, and the "
                "optimizer updates it once.",
                [one.steps_at],
            )
            for one in self._found.values()
        ]


def _and_others(more: int) -> str:
    return f"; {more} more pairs of parameters are like that" if more else ""


def _updated(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that its step changes."""
    return [
        parameter
        for group in optimizer.param_groups
        if not _is_zero(entry_of(group, "lr"))
        for parameter in members_of(group)
        if parameter.grad is not None and can_be_read(parameter) and parameter.numel()
    ]


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is 0.

    One in a tensor is not read, since that would wait for the device.
    """
    return isinstance(rate, (int, float)) and rate == 0


def _shared_pairs(parameters: list[torch.Tensor]) -> list[Pair]:
    """Those of which two have some element in common, as far as this is certain."""
    return [
        *_overlapping([one for one in parameters if _is_in_one_piece(one)]),
        *_of_one_layout(parameters),
    ]


def _overlapping(parameters: list[torch.Tensor]) -> Iterator[Pair]:
    last: torch.Tensor | None = None  # that which ends last of those before
    for parameter in sorted(parameters, key=address_of):
        if (
            last is not None
            and address_of(parameter) < address_of(last) + last.nbytes
            and parameter is not last
        ):
            yield last, parameter
        if (
            last is None
            or address_of(parameter) + parameter.nbytes > address_of(last) + last.nbytes
        ):
            last = parameter


def _of_one_layout(parameters: list[torch.Tensor]) -> Iterator[Pair]:
    """Pairs of parameters with gaps, which may be interwoven with others.

    They may not have the same places.
    """
    known: dict[tuple[object, ...], torch.Tensor] = {}
    for parameter in parameters:
        if not _is_in_one_piece(parameter):
            layout = sorted(zip(parameter.shape, parameter.stride(), strict=True))
            first = known.setdefault((address_of(parameter), *layout), parameter)
            if first is not parameter:
                yield first, parameter


def _is_in_one_piece(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, in some order."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def have_one_gradient(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the program added up their gradients itself, and gave both the sum."""
    one, other = first.grad, second.grad
    if (
        one is None
        or other is None
        or one.shape != other.shape
        or not (can_be_read(one) and can_be_read(other))
    ):
        return False
    with unwatched(), without_modes():
        return torch.equal(numbers_of(one), numbers_of(other))
