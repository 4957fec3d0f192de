"""Copies of parameters from before the last steps that losses still use.

The losses are computed with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.modules import names_of
from torchstrategy.testing._lints.evidence.nodes import leaf_of, name_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint

_LOOKED_AT = 6  # steps
_ENOUGH_STEPS = 2
_MOST_NODES = 20_000
# In the metadata of a node: the versions of parameters when it was seen first.
_SEEN = "torchstrategy.versions"
_COPIES = (
    "ToCopyBackward",
    "CloneBackward",
    "CopyBackwards",
    "CatBackward",
    "StackBackward",
)
# Their results have the memory of the parameter, and change with it.
_VIEWS = (
    *(
        "AsStrided",
        "Alias",
        "Detach",
        "Expand",
        "Permute",
        "Select",
        "Slice",
        "Split",
        "Squeeze",
        "T",
        "Transpose",
    ),
    *("Unbind", "Unsqueeze", "View", "Unfold", "Diagonal", "Reshape"),
)


class _Found(NamedTuple):
    names: list[str]
    steps: set[int]


@final
class OldCopies(Lint):
    """Looks in the graphs of losses for copies of a parameter that has changed.

    It has since they were made.

    torch says so if it needs the parameter again in backward. A copy needs nothing:
    `weight.to(device)` that is made once gives gradients to the parameter in each step,
    and never sees what the optimizer writes.
    """

    def __init__(self) -> None:
        self._found: dict[Place, _Found] = {}

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        if facts.steps > _LOOKED_AT:
            return
        trained = {id(parameter) for parameter in facts.parameters()}
        old: dict[int, torch.Tensor] = {}
        for node, parameter in _uses([loss.grad_fn for loss in losses]):
            if id(parameter) in trained and name_of(node).startswith(_COPIES):
                versions = node.metadata.setdefault(_SEEN, {})
                if versions.setdefault(
                    id(parameter), version_of(parameter)
                ) != version_of(parameter):
                    old[id(parameter)] = parameter
        if old:
            place = here()
            known = self._found.get(place) or _Found(
                names_of(list(old.values())), set()
            )
            known.steps.add(facts.steps)
            self._found[place] = known

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "copied-before-the-step",
                f"`backward` ({place}) goes through copies of parameters that were "
                f"made before the last steps: {some(found.names)}. The optimizer "
                "changes the parameters, and the loss is computed with the copies, "
                "which stay as they are.",
                "Move the module with `model.to(device)`, or make parameters of the "
                "copies, before you make the optimizer: `self.weight = "
                "nn.Parameter(weight.to(device))`.",
                [place],
            )
            for place, found in self._found.items()
            if len(found.steps) >= _ENOUGH_STEPS
        ]


def _uses(roots: Sequence[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The nodes of a graph that computed something from a leaf, each with the leaf.

    They may have computed it from a view of the leaf.
    """
    # Each with what has used its result, views left out.
    waiting = [(root, None) for root in roots]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node, user = waiting.pop()
        if node is None or (node, user) in seen:
            continue
        seen.add((node, user))
        leaf = leaf_of(node)
        if leaf is not None:
            if user is not None:
                yield user, leaf
            continue
        user = user if user is not None and _is_view(node) else node
        waiting += [(following, user) for following, _ in node.next_functions]


def _is_view(node: Any) -> bool:
    return name_of(node).partition("Backward")[0] in _VIEWS
