"""Gradients that a program leaves out when it reduces those of the other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy.testing._lints.evidence.copies import Copies
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.modules import (
    living_modules,
    names_of,
    own_parameters,
)
from torchstrategy.testing._lints.evidence.places import in_words
from torchstrategy.testing._lints.findings import Finding, finding, named_ranks, some
from torchstrategy.testing._lints.weights.multiplied_apart import multiplied_apart


class _Late(NamedTuple):
    """A parameter whose gradients differ between ranks, though its numbers did not.

    It had the same numbers until then.

    Attributes:
        name: What it is called.
        beside: The other parameters of its layer, as their copies.
        steps: How many steps the rank had made before.
    """

    name: str
    beside: Sequence[Copies]
    steps: int


@final
class LeftOut:
    """Looks for parameters whose gradients a program does not reduce.

    It looks among those that the program keeps alike itself.

    A head of each rank's own is no mistake. So a parameter counts if the program
    reduces the gradient of another one of the same layer.
    """

    def __init__(self) -> None:
        self._late: dict[Any, _Late] = {}  # by the key of their copies

    def knows(self, copies: Copies) -> bool:
        """Whether it was told of these since they are late."""
        return copies.key in self._late

    def stepped(self, facts: Facts, there: Mapping[int, Copies]) -> None:
        """A rank has made a step.

        Its parameters are given as the ids of their tensors, with their copies.
        """
        late = {
            own: one
            for own, one in there.items()
            if one.late is not None and not self.knows(one)
        }
        tensors = [
            tensor
            for one in late.values()
            for tensor in one.named[facts.rank]().values()
        ]
        if not tensors:
            return
        beside = _of_one_layer(tensors)
        for tensor, name in zip(tensors, names_of(tensors), strict=True):
            others = [there[own] for own in beside[id(tensor)] if own in there]
            self._late[late[id(tensor)].key] = _Late(name, others, facts.steps)

    def finding(self, all_copies: Sequence[Copies]) -> Finding | None:
        """What to say of them, if there are some."""
        late = [
            (copies, copies.late)
            for copies in all_copies
            if copies.late is not None and not copies.is_over and self.knows(copies)
        ]
        first = min((self._late[copies.key].steps for copies, _ in late), default=0)
        reduced = [
            copies
            for copies in all_copies
            if copies.late is None and copies.last_alike >= first
        ]
        found = [
            (copies, parted)
            for copies, parted in late
            if self._is_wrong(copies, reduced)
        ]
        if not found:
            return None
        apart = multiplied_apart(parted for _, parted in found)
        if apart is not None:
            return apart.finding()
        copies, parted = found[0]
        names = [self._late[its.key].name for its, _ in found]
        places = list(dict.fromkeys(taken.place for taken in parted.snapshots.values()))
        where = list(
            dict.fromkeys(
                one.reduced_at for one in reduced if one.reduced_at is not None
            )
        )
        at = f" ({in_words(where)})" if where else ""
        return finding(
            "gradient-not-reduced",
            f"In step {first + 1}, rank {copies.ranks[0]} and "
            f"{named_ranks(parted.ranks)} have made the step ({in_words(places)}) with "
            "gradients that differ for parameters that were alike until then: "
            f"{some(names)}. Those of {len(reduced)} other parameters are alike, since "
            f"they are reduced{at}.",
            "Reduce the gradients of all parameters that ranks have copies of.",
            [*places, *where],
        )

    def _is_wrong(self, copies: Copies, reduced: Sequence[Copies]) -> bool:
        return any(
            one is other for one in self._late[copies.key].beside for other in reduced
        )


def _of_one_layer(tensors: Sequence[torch.Tensor]) -> dict[int, set[int]]:
    """The parameters of the modules that have some tensors as their own, by id."""
    found: dict[int, set[int]] = {id(tensor): set() for tensor in tensors}
    for module in living_modules():
        own = {id(parameter) for _, parameter in own_parameters(module)}
        for tensor in own & found.keys():
            found[tensor] |= own - {tensor}
    return found
