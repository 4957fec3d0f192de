"""Frozen parts that were put into evaluation mode, and are back in training mode.

They went back with what is around them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.modules import (
    modules_in,
    parameters_in,
    rate_of_dropout,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import Dropout

_ENOUGH_STEPS = 2
_aten = torch.ops.aten


@final
@dataclass
class _Part:
    """A part on which `eval()` was called.

    Attributes:
        module: It.
        evaluated_at: Where that was.
        undone_at: Where `train()` of a larger module has undone it; None if nothing
            has.
        steps: How many steps were made since then in which it may have dropped
            something.
    """

    module: weakref.ref[nn.Module]
    evaluated_at: Place
    undone_at: Place | None = None
    steps: int = 0


@final
class UndoneModes(Lint):
    """Looks for frozen parts with dropout whose `eval()` is undone by `train()`.

    `train()` of the model that has them undoes it.

    Dropout has to act on something without a gradient in each step: only a part that is
    frozen, or rows, have none. Frozen parts on which nobody has called `eval()` by
    itself may be meant to drop.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Objects[nn.Module, _Part]] = defaultdict(Objects)
        self._all: list[_Part] = []
        self._has_dropped: set[int] = set()  # the ranks, since their last step

    @override
    def operators(self) -> dict[Any, Seen]:
        return {
            _aten.native_dropout.default: self._drops,
            _aten.bernoulli_.float: self._drops,
        }

    @override
    def changes_mode(self, facts: Facts, module: nn.Module, is_training: bool) -> None:
        parts = self._parts[facts.rank]
        within = {id(one) for _, one in modules_in(module)}
        if not is_training:
            for part in list(parts):
                if id(part) in within:
                    del parts[part]
            if _may_drop(module):
                parts[module] = _Part(weakref.ref(module), here())
                self._all.append(parts[module])
            return
        for part, known in list(parts.items()):
            if part is module:
                del parts[part]
            elif id(part) in within:
                known.undone_at = known.undone_at or here()

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if facts.rank not in self._has_dropped:
            return
        self._has_dropped.discard(facts.rank)
        for part, known in self._parts[facts.rank].items():
            if (
                known.undone_at is not None
                and _is_frozen(part)
                and _may_drop(part)
                and part.training
            ):
                known.steps += 1

    @override
    def findings(self) -> list[Finding | None]:
        by_place: dict[Place, list[_Part]] = defaultdict(list)
        for part in self._all:
            if part.undone_at is not None and part.steps >= _ENOUGH_STEPS:
                by_place[part.undone_at].append(part)
        return [_finding(undone_at, parts[0]) for undone_at, parts in by_place.items()]

    def _drops(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if any(self._parts.values()) and not (
            torch.is_grad_enabled() and args[0].requires_grad
        ):
            self._has_dropped.add(facts.rank)


def _dropouts(module: nn.Module) -> list[str]:
    kinds = (Dropout, nn.RNNBase, nn.MultiheadAttention)
    return [
        name
        for name, layer in modules_in(module)
        if isinstance(layer, kinds) and rate_of_dropout(layer)
    ]


def _may_drop(module: nn.Module) -> bool:
    return bool(_dropouts(module))


def _is_frozen(module: nn.Module) -> bool:
    parameters = parameters_in(module)
    return bool(parameters) and not any(
        parameter.requires_grad for parameter in parameters
    )


def _finding(undone_at: Place, part: _Part) -> Finding | None:
    module = part.module()
    names = [] if module is None else [name or "itself" for name in _dropouts(module)]
    shown = f" ({some(names)})" if names else ""
    return finding(
        "eval-mode-undone",
        f"`eval()` was called on a frozen part ({part.evaluated_at}), and `train()` of "
        f"a larger module ({undone_at}) puts it back into training mode: its "
        f"dropout{shown} acts in {part.steps} steps.",
        "Override `train` of the larger module, and call `self.part.eval()` in it "
        "after `super().train(mode)`; or call `eval()` of the part after each "
        "`train()`.",
        [part.evaluated_at, undone_at],
    )
