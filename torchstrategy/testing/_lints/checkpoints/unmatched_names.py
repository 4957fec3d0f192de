"""Checkpoints none of whose names are in the model that loads them."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.modules import WRAPPER
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_PREFIXES = (WRAPPER, "_orig_mod.")  # the second one is of torch.compile


class _Loaded(NamedTuple):
    """What was loaded: the class of the model, and how many names there were.

    The first name on both sides is there, too.
    """

    model: str
    num_names: int
    given: str
    wanted: str


@final
class UnmatchedNames(Lint):
    """Compares names where a model loads a state.

    Without `strict=False` torch raises an error.
    """

    def __init__(self) -> None:
        self._found: dict[Place, _Loaded] = {}

    @override
    def restored(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        # torch counts these after hooks of the module have given the state other names.
        given, wanted = misfits.unexpected_keys, misfits.missing_keys
        if wanted and 0 < len(state) <= len(given):
            self._found.setdefault(
                here(), _Loaded(type(module).__name__, len(given), given[0], wanted[0])
            )

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(place, loaded) for place, loaded in self._found.items()]


def _finding(place: Place, loaded: _Loaded) -> Finding | None:
    prefix = next(
        (
            p
            for p in _PREFIXES
            if loaded.given.startswith(p) != loaded.wanted.startswith(p)
        ),
        "",
    )
    mend = "Give the state the names of the model, and leave `strict=False` out."
    if prefix:
        mend = (
            f"Save the state of the model itself, whose names have no {prefix!r}, and "
            "leave `strict=False` out."
        )
    return finding(
        "nothing-loaded",
        f"`load_state_dict` at {place} has loaded nothing: none of {loaded.num_names} "
        f"names, such as {loaded.given!r}, is in {loaded.model}, which has "
        f"{loaded.wanted!r}, and `strict=False` keeps that quiet.",
        mend,
        [place],
    )
