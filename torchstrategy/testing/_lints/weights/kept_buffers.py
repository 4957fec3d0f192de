"""Buffers that a program leaves out when it broadcasts the parameters of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of
from torchstrategy.testing._lints.evidence.fingerprints import (
    Fingerprint,
    can_be_read,
    fingerprint,
)
from torchstrategy.testing._lints.evidence.modules import (
    has_statistics,
    joined,
    living_modules,
    modules_in,
    own_buffers,
    parameters_in,
)
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, named_ranks, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import is_persistent
from torchstrategy.testing._ranks.witnesses import Told

_MOST_LOOKS = 12
_FEWEST_LOOKS = 2
_MOST_ELEMENTS = 1 << 20


class _Key(NamedTuple):
    """A model, the same on all ranks, where Python finds modules in another order."""

    ranks: tuple[int, ...]
    position: int  # of its first parameter


@final
@dataclass
class _Buffer:
    """A buffer of a model.

    Attributes:
        first: What it was when a rank looked first, by rank.
        looks: How often a rank has looked.
        changes: Whether it was something else at some later look.
    """

    first: dict[int, Fingerprint] = field(default_factory=dict)
    looks: Counter[int] = field(default_factory=Counter)
    changes: bool = False

    def add(self, rank: int, value: Fingerprint) -> None:
        """Notes what it is on a rank now."""
        self.looks[rank] += 1
        self.changes = self.changes or value != self.first.setdefault(rank, value)

    def is_apart(self, ranks: tuple[int, ...]) -> bool:
        """Whether it has stayed what it was on each rank, with other numbers there.

        The shape is the same.
        """
        counts = {self.looks[rank] for rank in ranks}
        if self.changes or len(counts) > 1 or min(counts) < _FEWEST_LOOKS:
            return False
        first, *others = (self.first[rank] for rank in ranks)
        are_drawn = all(
            one.is_drawn and one.shape == first.shape for one in (first, *others)
        )
        return are_drawn and any(not first.is_close_to(one) for one in others)


@final
class KeptBuffers(Lint):
    """Compares the buffers of models on several ranks, after some of their steps.

    Nobody keeps buffers alike where a program broadcasts parameters and reduces
    gradients itself. Ranks may have buffers of their own. It is a mistake if a program
    broadcasts the parameters of a module, and not a buffer that checkpoints have, and
    that stays as it is. Running statistics of batch norm are left alone.
    """

    def __init__(self) -> None:
        # By rank: the addresses of what was broadcast.
        self._broadcast: dict[int, set[int]] = defaultdict(set)
        self._buffers: dict[_Key, dict[str, _Buffer]] = defaultdict(
            lambda: defaultdict(_Buffer)
        )
        self._places: dict[_Key, Place] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if told.kind == "broadcast" and not is_of_torch and not facts.steps:
            self._broadcast[facts.rank] |= set(
                map(address_of, [*told.gives, *told.gets])
            ) - {0}

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        step = facts.steps + 1
        # The steps 1, 2, 4, 8, ...
        is_looked_at = not step & (step - 1) and step <= 1 << _MOST_LOOKS
        if (
            len(facts.reducers) < 2
            or facts.called
            or not self._broadcast[facts.rank]
            or not is_looked_at
        ):
            return
        for key, model in self._models_of(facts):
            self._places.setdefault(key, here())
            for name, buffer in _buffers_of(model):
                value = fingerprint(buffer)
                if value is not None:
                    self._buffers[key][name].add(facts.rank, value)

    @override
    def findings(self) -> list[Finding | None]:
        found: list[Finding | None] = []
        for key, buffers in self._buffers.items():
            apart = [
                name for name, buffer in buffers.items() if buffer.is_apart(key.ranks)
            ]
            if apart:
                found.append(_not_sent(apart, key.ranks, self._places[key]))
        return found

    def _models_of(self, facts: Facts) -> list[tuple[_Key, nn.Module]]:
        """The models whose parameters the program has broadcast, with their keys.

        It reduces their gradients, too.
        """
        positions = {id(one): at for at, one in enumerate(facts.parameters())}
        reduced = {
            own for own, address in facts.gradients.items() if address in facts.reduced
        }
        owners = [
            one
            for one in living_modules()
            if any(id(own) in reduced for own in parameters_in(one))
        ]
        inner = {
            id(part)
            for owner in owners
            for _, part in modules_in(owner)
            if part is not owner
        }
        found, sent = [], self._broadcast[facts.rank]
        for root in owners:
            own = parameters_in(root)
            if id(root) not in inner and any(address_of(one) in sent for one in own):
                first = min(positions.get(id(one), len(positions)) for one in own)
                found.append((_Key(facts.reducers, first), root))
        return found


def _buffers_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    found = []
    for prefix, module in modules_in(model):
        for name, buffer in () if has_statistics(module) else own_buffers(module):
            is_small = buffer.numel() <= _MOST_ELEMENTS and can_be_read(buffer)
            if is_small and buffer.is_floating_point() and is_persistent(module, name):
                found.append((joined(prefix, name), buffer))
    return found


def _not_sent(names: list[str], ranks: tuple[int, ...], place: Place) -> Finding | None:
    return finding(
        "weights-differ",
        f"Rank {ranks[0]} and {named_ranks(ranks[1:])} have other numbers in buffers "
        f"of the model that they train ({place}): {some(names)}. The program has "
        "broadcast its parameters, and not these.",
        "Broadcast the buffers with the parameters: `for tensor in "
        "[*model.parameters(), *model.buffers()]: dist.broadcast(tensor.detach(), 0)`.",
        [place],
    )
