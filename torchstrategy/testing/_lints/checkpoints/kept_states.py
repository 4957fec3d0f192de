"""States of a module that a program keeps to restore them.

Their memory is that of the module itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, parameters_of
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.modules import named_parameters
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._ranks.witnesses import Told

_LastSteps = Objects[torch.optim.Optimizer, int]


class _Given(NamedTuple):
    """Where and after how many steps of its rank `state_dict()` gave a tensor."""

    place: Place
    steps: int


class _Found(NamedTuple):
    given_at: Place
    parameters: int
    steps: int


@final
class KeptStates(Lint):
    """Looks for a loaded state that has the memory of all that it is loaded into.

    The state was made before steps of the optimizer.

    Loading it changes nothing. A state that is loaded again before the next step, or
    that has other tensors for some parameters, is left alone.
    """

    def __init__(self) -> None:
        self._given = WeakIdKeyDictionary()  # by tensor
        self._last_steps: dict[int, _LastSteps] = defaultdict(Objects)  # by rank
        # By rank and id, after the last step.
        self._versions: dict[int, dict[int, int]] = defaultdict(dict)
        # By rank, by collectives since then.
        self._exchanged: dict[int, set[int]] = defaultdict(set)
        self._found: dict[Place, _Found] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return {torch.ops.aten.detach.default: self._detaches}

    def _detaches(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """`value.detach()` has the memory of the value."""
        given = self._given.get(args[0]) if self._given else None
        if given is not None:
            self._given[result] = given

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._last_steps[facts.rank][optimizer] = facts.steps

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._exchanged.pop(facts.rank, None)
        if self._given:
            self._versions[facts.rank] |= {
                id(one): version_of(one) for one in parameters_of(optimizer)
            }

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if self._given and not is_of_torch:
            self._exchanged[facts.rank] |= set(
                map(address_of, [*told.gives, *told.gets])
            ) - {0}

    @override
    def gave_state(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any]
    ) -> None:
        given = _Given(here(), facts.steps)
        for value in state.values():
            if type(value) is torch.Tensor:
                self._given[value] = given

    @override
    def restored(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        steps = self._last_steps[facts.rank]
        trained = {
            id(one): steps[optimizer]
            for optimizer in list(steps)
            for one in parameters_of(optimizer)
        }
        named = [
            (name, one)
            for name, one in named_parameters(module)
            if id(one) in trained and one.numel()
        ]
        versions = self._versions[facts.rank]
        # Loading has written once. Who has written besides, as an average, has made
        # something else of the weights.
        if any(
            version_of(one) > versions.get(id(one), version_of(one)) + 1
            for _, one in named
        ):
            return
        if any(address_of(one) in self._exchanged[facts.rank] for _, one in named):
            return
        given = [
            self._given_of(state.get(name), parameter) for name, parameter in named
        ]
        if not given or None in given:
            return
        last = max((one for one in given if one is not None), key=lambda one: one.steps)
        if any(trained[id(parameter)] >= last.steps for _, parameter in named):
            self._found.setdefault(
                here(), _Found(last.place, len(given), facts.steps - last.steps)
            )

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "state-is-the-weights",
                f"`load_state_dict` at {place} restores nothing. What it is given has "
                f"the memory of the weights themselves, for all {found.parameters} "
                "parameters that are trained: it is from `state_dict()` at "
                f"{found.given_at}, and has followed the {found.steps} steps since "
                "then.",
                "Keep a copy: `best = copy.deepcopy(model.state_dict())`.",
                [place, found.given_at],
            )
            for place, found in self._found.items()
        ]

    def _given_of(self, value: Any, parameter: torch.Tensor) -> _Given | None:
        """When `state_dict()` has given a tensor that has a parameter's memory.

        It is None if it is another tensor.
        """
        if (
            type(value) is not torch.Tensor
            or not address_of(value)
            or address_of(value) != address_of(parameter)
        ):
            return None
        given: _Given | None = self._given.get(value)
        return given
