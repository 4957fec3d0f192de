"""Groups of parameters with settings of their own, which become one value.

They have one value for all before the first step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import entry_of
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_ENOUGH_STEPS = 2
_SETTINGS = ("lr", "weight_decay", "momentum", "betas")
_SHOWN = 3


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        made_at: Where it was made.
        apart: The settings of its groups, by name, of those that differ between groups
            and never have in a step.
        rank: Whose it is.
        steps: In how many steps a setting was the same for all groups, by its name.
        last: What it was in the last of them.
        steps_at: Where that was.
        steps_of_rank: How many steps the rank had made by then.
    """

    made_at: Place
    apart: dict[str, list[Any]]
    rank: int
    steps: dict[str, int] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    steps_at: Place | None = None
    steps_of_rank: int = 0


@final
class GroupSettings(Lint):
    """Looks for optimizers whose groups were made with values that differ.

    They have made no step with them.

    Steps with a value for all that is not above those of the groups do not count:
    warmups begin so. Nor does an optimizer after which another one makes more steps, as
    that of a search for a learning rate.
    """

    def __init__(self) -> None:
        self._by_optimizer: Objects[torch.optim.Optimizer, _Seen] = Objects()
        self._all: list[_Seen] = []
        self._steps: dict[int, int] = {}  # by rank

    @override
    def has_optimizer(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        settings = {name: _settings_of(optimizer, name) for name in _SETTINGS}
        apart = {
            name: values
            for name, values in settings.items()
            if values is not None and len(set(values)) > 1
        }
        if apart:
            self._by_optimizer[optimizer] = seen = _Seen(here(), apart, facts.rank)
            self._all.append(seen)

    @override
    def restored_optimizer(
        self, facts: Facts, optimizer: torch.optim.Optimizer, state: Any
    ) -> None:
        # Its settings are those of the checkpoint.
        seen = self._by_optimizer.pop(optimizer, None)
        if seen is not None:
            self._all.remove(seen)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._by_optimizer.get(optimizer)
        for name in list(seen.apart) if seen is not None else ():
            assert seen is not None
            values = _settings_of(optimizer, name)
            if (
                values is None
                or len(set(values)) > 1
                or len(values) != len(seen.apart[name])
            ):
                del seen.apart[name]
            elif values[0] > min(seen.apart[name]):
                seen.steps[name] = seen.steps.get(name, 0) + 1
                seen.last[name], seen.steps_at, seen.steps_of_rank = (
                    values[0],
                    here(),
                    facts.steps,
                )
        self._steps[facts.rank] = facts.steps

    @override
    def findings(self) -> list[Finding | None]:
        found = [
            (seen, name)
            for seen in self._all
            for name in seen.apart
            if seen.steps.get(name, 0) >= _ENOUGH_STEPS
        ]
        by_place: dict[tuple[Place, str], _Seen] = {}
        for seen, name in found:
            if self._steps[seen.rank] - seen.steps_of_rank > seen.steps[name]:
                continue
            by_place.setdefault((seen.made_at, name), seen)
        return [_finding(seen, name) for (_, name), seen in by_place.items()]


def _settings_of(optimizer: torch.optim.Optimizer, name: str) -> list[Hashable] | None:
    """The numbers that groups have for a setting; None if one is no number.

    A tensor is none, and is not read.

    Nor can a number be compared with several.
    """
    values = [entry_of(group, name) for group in optimizer.param_groups]
    parts = [
        part
        for value in values
        for part in (value if isinstance(value, (tuple, list)) else [value])
    ]
    lengths = {
        len(value) if isinstance(value, (tuple, list)) else None for value in values
    }
    if len(lengths) > 1 or not all(isinstance(part, (int, float)) for part in parts):
        return None
    return [tuple(value) if isinstance(value, list) else value for value in values]


def _finding(seen: _Seen, name: str) -> Finding | None:
    assert seen.steps_at is not None
    values = list(dict.fromkeys(seen.apart[name]))
    shown = ", ".join(
        f"{value:g}" if isinstance(value, float) else str(value)
        for value in values[:_SHOWN]
    )
    more = ", ..." if len(values) > _SHOWN else ""
    places = [seen.made_at, seen.steps_at]
    return finding(
        "group-settings-overwritten",
        f"The groups of the optimizer get {name!r} of their own ({seen.made_at}): "
        f"{shown}{more}. All {seen.steps[name]} steps ({in_words([seen.steps_at])}) "
        f"are made with one value for all groups, such as {seen.last[name]} in the "
        "last: something has written it into each.",
        f'Write what belongs to the group: `group["{name}"] = value * group["scale"]`. '
        "`OneCycleLR` and `CyclicLR` "
        "take a list with a value for each group.",
        places,
    )
