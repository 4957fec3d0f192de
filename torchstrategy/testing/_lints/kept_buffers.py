"""Buffers that ranks do not keep alike, in modules whose other tensors they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.facts import Facts, address_of
from torchstrategy.testing._lints.findings import Finding, finding, named_ranks, some
from torchstrategy.testing._lints.fingerprints import Fingerprint, can_be_read, fingerprint
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.modules import (
    has_statistics,
    joined,
    living_modules,
    modules_in,
    own_buffers,
    parameters_in,
)
from torchstrategy.testing._lints.places import Place, here
from torchstrategy.testing._lints.torch_internals import is_persistent
from torchstrategy.testing._ranks.witnesses import Told

_MOST_LOOKS = 12
_FEWEST_LOOKS = 2
_MOST_ELEMENTS = 1 << 20


class _Look(NamedTuple):
    """A buffer, at the looks of one rank."""

    step: int
    value: Fingerprint


@final
class KeptBuffers(Lint):
    """Compares the buffers of models on several ranks, after some of their steps.

    Nobody keeps buffers alike where a program broadcasts parameters and reduces gradients itself. Ranks may have
    buffers of their own. It is a mistake if a program broadcasts the parameters of a module, and not a buffer that
    checkpoints have, and that stays as it is. Running statistics of batch norm are left alone.
    """

    def __init__(self) -> None:
        self._broadcast: dict[int, set[int]] = defaultdict(set)  # by rank: the addresses of what was broadcast
        self._looks: dict[tuple[Any, str], dict[int, list[_Look]]] = defaultdict(lambda: defaultdict(list))
        self._ranks: dict[Any, tuple[int, ...]] = {}
        self._places: dict[Any, Place] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if told.kind == "broadcast" and not is_of_torch and not facts.steps:
            self._broadcast[facts.rank] |= set(map(address_of, [*told.gives, *told.gets])) - {0}

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        step = facts.steps + 1
        is_looked_at = not step & (step - 1) and step <= 1 << _MOST_LOOKS  # the steps 1, 2, 4, 8, ...
        if len(facts.reducers) < 2 or facts.called or not self._broadcast[facts.rank] or not is_looked_at:
            return
        for key, model in self._models_of(facts):
            self._ranks[key] = facts.reducers
            self._places.setdefault(key, here())
            for name, buffer in _buffers_of(model):
                value = fingerprint(buffer)
                if value is not None:
                    self._looks[key, name][facts.rank].append(_Look(step, value))

    @override
    def findings(self) -> list[Finding | None]:
        found: list[Finding | None] = []
        for key, ranks in self._ranks.items():
            looks = {name: by_rank for (of, name), by_rank in self._looks.items() if of == key}
            whole = {name: of for name, of in looks.items() if set(of) >= set(ranks) and _is_whole(of)}
            apart = [name for name, of in whole.items() if _are_apart(of, ranks) and not _changes(of)]
            if apart:
                found.append(_not_sent(apart, ranks, self._places[key]))
        return found

    def _models_of(self, facts: Facts) -> list[tuple[Any, nn.Module]]:
        """The models of which the program has broadcast parameters, and whose gradients it reduces, with their keys."""
        positions = {id(one): at for at, one in enumerate(facts.parameters())}
        reduced = {own for own, address in facts.gradients.items() if address in facts.reduced}
        owners = [one for one in living_modules() if any(id(own) in reduced for own in parameters_in(one))]
        inner = {id(part) for owner in owners for _, part in modules_in(owner) if part is not owner}
        found, sent = [], self._broadcast[facts.rank]
        for root in owners:
            own = parameters_in(root)
            if id(root) not in inner and any(address_of(one) in sent for one in own):
                # Python finds modules in another order on each rank.
                first = min(positions.get(id(one), len(positions)) for one in own)
                found.append(((facts.reducers, first), root))
        return found


def _buffers_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    found = []
    for prefix, module in modules_in(model):
        for name, buffer in () if has_statistics(module) else own_buffers(module):
            is_small = buffer.numel() <= _MOST_ELEMENTS and can_be_read(buffer)
            if is_small and buffer.is_floating_point() and is_persistent(module, name):
                found.append((joined(prefix, name), buffer))
    return found


def _is_whole(by_rank: Mapping[int, list[_Look]]) -> bool:
    """Whether all ranks have looked at the same steps, and often enough."""
    steps = {tuple(look.step for look in looks) for looks in by_rank.values()}
    return len(steps) == 1 and len(next(iter(steps))) >= _FEWEST_LOOKS


def _changes(by_rank: Mapping[int, list[_Look]]) -> bool:
    return any(len({look.value for look in looks}) > 1 for looks in by_rank.values())


def _are_apart(by_rank: Mapping[int, list[_Look]], ranks: tuple[int, ...]) -> bool:
    """Whether a buffer has other numbers on ranks at each look, and the same shape."""
    first = by_rank[ranks[0]]
    others = [by_rank[rank] for rank in ranks[1:]]
    are_drawn = all(_is_drawn(look.value) for looks in by_rank.values() for look in looks)
    has_one_shape = all(look.value.shape == first[0].value.shape for looks in by_rank.values() for look in looks)
    return (
        are_drawn
        and has_one_shape
        and all(any(not look.value.is_close_to(looks[at].value) for looks in others) for at, look in enumerate(first))
    )


def _is_drawn(value: Fingerprint) -> bool:
    return len(set(value.sample)) > 2


def _not_sent(names: list[str], ranks: tuple[int, ...], place: Place) -> Finding | None:
    return finding(
        "weights-differ",
        f"Rank {ranks[0]} and {named_ranks(ranks[1:])} have other numbers in buffers of the model that they train "
        f"({place}): {some(names)}. The program has broadcast its parameters, and not these.",
        "Broadcast the buffers with the parameters: "
        "`for tensor in [*model.parameters(), *model.buffers()]: dist.broadcast(tensor.detach(), 0)`.",
        [place],
    )
