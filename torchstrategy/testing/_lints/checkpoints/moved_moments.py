"""States of an optimizer, loaded for other parameters than they were saved of."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.checkpoints.checkpoints import is_moment
from torchstrategy.testing._lints.evidence.asking import entry_of
from torchstrategy.testing._lints.evidence.facts import Facts, members_of, parameters_of
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    checksum,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.modules import WRAPPER, longest_names
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_ENOUGH = 2  # parameters: two have changed places


class _Saved(NamedTuple):
    """Of which parameter an optimizer has given what it knows."""

    name: str
    place: Place


class _Found(NamedTuple):
    saved_at: Place
    parameters: int
    saved: str
    loaded: str


@final
class MovedMoments(Lint):
    """Compares the names of parameters when an optimizer's state is saved and loaded.

    They are saved when `state_dict()` of the optimizer is called.

    A state has positions, and no names. An optimizer that has its parameters in another
    order takes the moments of one for those of another, if the shapes allow it.
    """

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}  # by a checksum of the first moment
        self._found: dict[Place, _Found] = {}

    @override
    def gave_optimizer_state(
        self, facts: Facts, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        place = here()
        for name, moment in _named_moments(optimizer, state):
            self._saved[moment] = _Saved(name, place)

    @override
    def restored_optimizer(
        self, facts: Facts, optimizer: torch.optim.Optimizer, state: Any
    ) -> None:
        if not self._saved:
            return
        pairs = [
            (self._saved.get(moment), name)
            for name, moment in _named_moments(optimizer, state)
        ]
        known = [(saved, name) for saved, name in pairs if saved is not None]
        if {saved.name for saved, _ in known} != {name for _, name in known}:
            return  # parameters were renamed, or are those of another model
        moved = [(saved, name) for saved, name in known if saved.name != name]
        if len(moved) >= _ENOUGH:
            saved, name = moved[0]
            self._found.setdefault(
                here(), _Found(saved.place, len(moved), saved.name, name)
            )

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "state-of-other-parameters",
                f"`load_state_dict` of the optimizer ({place}) gives "
                f"{found.parameters} parameters what was saved of others "
                f"({found.saved_at}): {found.loaded} gets the moments of "
                f"{found.saved}. A state has positions and no names, and the "
                "parameters are in another order than when it was saved.",
                "Make the optimizer from `model.parameters()` in the same order as "
                "before, with the same groups.",
                [place, found.saved_at],
            )
            for place, found in self._found.items()
        ]


def _named_moments(
    optimizer: torch.optim.Optimizer, state: Any
) -> list[tuple[str, int]]:
    """For each parameter of a module: its name and a checksum of its state.

    The checksum is of the first of what a state knows of it.
    """
    known, groups = entry_of(state, "state"), entry_of(state, "param_groups")
    if not isinstance(known, dict) or not isinstance(groups, list):
        return []
    parameters = parameters_of(optimizer)
    positions = [position for group in groups for position in members_of(group)]
    names = longest_names(parameters)
    found = []
    for position, parameter in zip(positions, parameters, strict=False):
        moments = entry_of(known, position)
        first = (
            next(filter(is_moment, dict.values(moments)), None)
            if isinstance(moments, dict)
            else None
        )
        name = names.get(id(parameter), "").removeprefix(WRAPPER)
        if first is not None and name and first.numel() and can_be_read(first):
            numbers = numbers_of(first)
            with torch.no_grad(), unwatched(), without_modes():
                # Those that are all zero are alike.
                is_drawn = bool((numbers != numbers.view(-1)[0]).any())
            if is_drawn:
                found.append((name, checksum(numbers)))
    return found
