"""Parameters at the same position of an optimizer in several ranks.

How they begin, and when they part.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from torchstrategy.testing._lints.evidence.copies import Copies, Parted, Way, snapshot
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.modules import (
    living_modules,
    named_parameters,
    nameless,
    own_parameters,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place

EXCHANGING = ("all_to_all", "send", "recv")
"""Collectives of programs whose ranks have other parts of a model.

Stages of a pipeline are such parts, and experts.
"""
_ENOUGH_STEPS = 3  # after these, copies that no rank has trained alone stay alike


class Owner(NamedTuple):
    """Who has a parameter: its longest name, and the class of the module."""

    name: str
    kind: str


@final
@dataclass
class Track:
    """A parameter that several ranks have at the same position.

    Attributes:
        copies: Its copies.
        owners: Who has it, for each rank; None before it has parted.
    """

    copies: Copies
    owners: list[Owner] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all ranks began with the same random numbers, not with parts."""
        return self.copies.began_alike

    @property
    def is_part(self) -> bool:
        """Whether ranks began with other numbers, or with other shapes."""
        return self.copies.began_apart or not self.copies.was_compared

    def parted(self) -> Parted | None:
        """Since when it differs between ranks, by gradients that differed.

        It is None if it does not, or has another name.
        """
        found, owners = self.copies.parted, self.owners or []
        if (
            found is None
            or not found.has_other_gradients
            or len({owner.name for owner in owners}) != 1
        ):
            return None
        was_awaited = all(taken.way.was_awaited for taken in found.snapshots.values())
        return found if was_awaited and self.copies.differ_at_last() else None


@final
class Tracks:
    """Follows the parameters of optimizers.

    A caller says which, and among what ranks.
    """

    def __init__(self) -> None:
        # By ranks, optimizer and position.
        self._tracks: dict[tuple[tuple[int, ...], int, int], Track] = {}
        # By rank and id.
        self._of: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], Track]] = {}
        self._numbers: dict[int, Objects[torch.optim.Optimizer, int]] = defaultdict(
            Objects
        )

    def begins(
        self,
        facts: Facts,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[tuple[int, torch.Tensor]],
        ranks: tuple[int, ...],
    ) -> list[Track]:
        """Parameters, with positions, of an optimizer that is going to make a step."""
        known = self._numbers[facts.rank]
        number = known.setdefault(optimizer, len(known))
        tracks = [
            self._track(facts, parameter, (ranks, number, position))
            for position, parameter in parameters
        ]
        for track in tracks:
            copies = track.copies
            made = copies.steps[facts.rank]
            if not copies.is_over and (not made or copies.parted is not None):
                # Copies that have parted may have been averaged since the last step.
                copies.add(
                    facts.rank,
                    made + 0.5 if made else 0,
                    snapshot(
                        facts, copies.named[facts.rank](), False, Way(skips=facts.skips)
                    ),
                )
        return tracks

    def ends(self, facts: Facts, tracks: Sequence[Track]) -> None:
        """The step is made."""
        for track in tracks:
            copies = track.copies
            copies.steps[facts.rank] += 1
            if copies.is_over or (
                copies.parted is None and copies.steps[facts.rank] > _ENOUGH_STEPS
            ):
                continue
            way = Way(was_awaited=facts.was_awaited, skips=facts.skips)
            copies.add(
                facts.rank,
                copies.steps[facts.rank],
                snapshot(facts, copies.named[facts.rank](), True, way),
            )
        _name(
            [
                track
                for track in tracks
                if track.copies.parted is not None and track.owners is None
            ]
        )

    def _track(
        self,
        facts: Facts,
        parameter: torch.Tensor,
        key: tuple[tuple[int, ...], int, int],
    ) -> Track:
        there, track = self._of.get((facts.rank, id(parameter)), (None, None))
        if track is None or there is None or there() is not parameter:
            track = self._tracks.setdefault(
                key, Track(Copies(("track", *key), key[0], False, may_differ=True))
            )
            made = weakref.ref(parameter)
            track.copies.named[facts.rank] = lambda: (
                {"": tensor} if (tensor := made()) is not None else {}
            )
            self._of[facts.rank, id(parameter)] = made, track
        return track


def places_of(parted: Sequence[Parted]) -> list[Place]:
    """Where ranks made the steps after which something differed."""
    return list(
        dict.fromkeys(taken.place for one in parted for taken in one.snapshots.values())
    )


def _name(tracks: Sequence[Track]) -> None:
    """Notes who has some parameters, while the modules are there."""
    if not tracks:
        return
    owners: dict[int, Owner] = {}
    for module in living_modules():
        kind = type(module).__name__
        own = {id(parameter): kind for _, parameter in own_parameters(module)}
        for name, parameter in named_parameters(module):
            known = owners.get(id(parameter), Owner("", ""))
            owners[id(parameter)] = Owner(
                max(known.name, name, key=len), own.get(id(parameter), known.kind)
            )
    for track in tracks:
        parted = track.copies.parted
        there = (
            []
            if parted is None
            else [taken.tensors[""]() for taken in parted.snapshots.values()]
        )
        track.owners = [
            owners.get(id(tensor), Owner(nameless(tensor.shape), ""))
            for tensor in there
            if tensor is not None
        ]
