"""Parameters beside those that `fully_shard` has: nobody reduces their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from typing_extensions import override

from torchstrategy._base.errors import plural
from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import (
    exchanging_function_here,
    in_words,
)
from torchstrategy.testing._lints.evidence.tracks import (
    EXCHANGING,
    Track,
    Tracks,
    places_of,
)
from torchstrategy.testing._lints.findings import Finding, finding, listed_ranks, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.sharding.unreduced import models_with
from torchstrategy.testing._lints.torch_internals import part_of, ranks_of_mesh
from torchstrategy.testing._ranks.witnesses import Told


@final
@dataclass
class _Seen:
    """What is known of an optimizer.

    Attributes:
        ranks: Among whom `fully_shard` shares out its parameters; none if it does not.
        sharded: How many it shares out.
        others: The positions of its other parameters, by which ranks know them.
        tracks: What is followed of these.
    """

    ranks: tuple[int, ...] = ()
    sharded: int = 0
    others: Objects[torch.Tensor, int] = field(default_factory=Objects)
    tracks: list[Track] = field(default_factory=list)


@final
class Unsharded(Lint):
    """Compares other parameters of an optimizer with parameters of `fully_shard`.

    It does if they begin alike.
    """

    def __init__(self) -> None:
        self._tracks = Tracks()
        self._seen: Objects[torch.optim.Optimizer, _Seen] = Objects()
        # Of each optimizer of the first rank, by the id of what is known.
        self._all: dict[int, _Seen] = {}
        self._has_parts = False
        # Whether a function of the program hands activations from rank to rank.
        self._passes_on = False

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        self._has_parts = self._has_parts or told.kind in EXCHANGING
        self._passes_on = self._passes_on or exchanging_function_here() is not None

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if facts.size < 2:
            return
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _looked_at(parameters_of(optimizer))
        if facts.rank in seen.ranks and seen.others:
            left = parameters_of(optimizer)  # the program may have taken some out of it
            those = [
                (seen.others[parameter], parameter)
                for parameter in left
                if parameter in seen.others
            ]
            seen.tracks = self._tracks.begins(facts, optimizer, those, seen.ranks)
            if facts.rank == seen.ranks[0]:
                self._all[id(seen)] = seen

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.get(optimizer)
        if seen is not None and seen.tracks:
            self._tracks.ends(facts, seen.tracks)

    @override
    def findings(self) -> list[Finding | None]:
        return (
            []
            if self._has_parts
            else [self._finding(seen) for seen in self._all.values()]
        )

    def _finding(self, seen: _Seen) -> Finding | None:
        """What to say of an optimizer.

        Ones and zeros are alike without a reason where others differ, as in experts.
        """
        if any(track.is_part for track in seen.tracks):
            there = [
                track for track in seen.tracks if track.is_whole and not self._passes_on
            ]
        elif self._passes_on and any(track.is_whole for track in seen.tracks):
            # These can be experts, each with rows of all ranks, that begin from one
            # seed.
            there = []
        else:
            there = seen.tracks
        found = [
            (track, since) for track in there if (since := track.parted()) is not None
        ]
        if not found:
            return None
        found.sort(key=lambda one: one[1].step)
        names = [owner.name for track, _ in found for owner in (track.owners or [])[:1]]
        first = found[0][1]
        places = places_of([since for _, since in found])
        return finding(
            "gradient-not-reduced",
            f"In step {first.step}, ranks "
            f"{listed_ranks([seen.ranks[0], *first.ranks])} have called the optimizer "
            f"({in_words(places)}) with other gradients of "
            f"{plural(len(names), 'parameter')} that `fully_shard` does not have, "
            f"beside {seen.sharded} that it has, and these differ since then: "
            f"{some(names)}.",
            "Take them out of `ignored_params`, or call `fully_shard` on a module that "
            "has them: it reduces gradients of its own parameters only. Or reduce them "
            "before each step, `dist.all_reduce(p.grad)`, and divide by the number of "
            "ranks.",
            places,
        )


def _looked_at(parameters: Sequence[torch.Tensor]) -> _Seen:
    sharded = [parameter for parameter in parameters if part_of(parameter) is not None]
    others: Objects[torch.Tensor, int] = Objects()
    for position, parameter in enumerate(parameters):
        if is_plain(parameter) and parameter.requires_grad:
            others[parameter] = position
    if not sharded or not others or not models_with(sharded):
        return _Seen()
    return _Seen(ranks_of_mesh(sharded[0]), len(sharded), others)
