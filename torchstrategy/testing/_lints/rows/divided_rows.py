"""Ranks that divide a model, and get other rows from a sampler not told of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute, number_in
from torchstrategy.testing._lints.evidence.facts import Facts, address_of
from torchstrategy.testing._lints.evidence.places import (
    Place,
    exchanging_function_here,
    here,
)
from torchstrategy.testing._lints.findings import Finding, finding, listed_ranks
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._ranks.witnesses import Told

_ENOUGH_STEPS = 3

Group = tuple[int, ...]


@final
@dataclass(eq=False)
class _Step:
    """What a rank has done since its last step.

    Attributes:
        exchanged: Where activations were added up within a layer, by the ranks that
            did.
        reduced: Where gradients were reduced, by the ranks that did.
        read_at: Where rows were drawn from a `DistributedSampler` that deals them out
            to all ranks.
        rows: These rows.
    """

    exchanged: dict[Group, Place] = field(default_factory=dict)
    reduced: dict[Group, Place] = field(default_factory=dict)
    read_at: Place | None = None
    rows: tuple[Any, ...] = ()


class _Mixed(NamedTuple):
    """A step whose activations are sums over ranks with other rows."""

    divides: Group
    reduces: Group
    places: tuple[Place, Place, Place]  # of activations, of gradients, of rows


@final
class DividedRows(Lint):
    """Looks for ranks that add up activations, and that draw other rows.

    Their gradients never meet.

    Experts that ranks exchange rows with are something else: what all ranks have is
    reduced over all of them then.
    """

    def __init__(self) -> None:
        self._step: dict[int, _Step] = defaultdict(_Step)
        self._opened: dict[int, tuple[Any, Place]] = {}
        self._rows: dict[tuple[Group, int], dict[int, tuple[Any, ...]]] = defaultdict(
            dict
        )  # by group and step
        # By rank, in its first steps.
        self._mixed: dict[int, list[_Mixed]] = defaultdict(list)
        self._right: set[int] = set()  # ranks that have made another step

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        if facts.size > 2:  # else there is no other group that reduces gradients
            self._opened[facts.rank] = loader, here()

    @override
    def drew(self, facts: Facts, loader: Any, rows: Any) -> None:
        opened, place = self._opened.get(facts.rank, (None, None))
        sampler = attribute(loader, "sampler")
        if (
            opened is loader
            and isinstance(rows, (list, tuple))
            and isinstance(sampler, DistributedSampler)
        ):
            step = self._step[facts.rank]
            step.read_at = (
                place if number_in(sampler, "num_replicas") == facts.size else None
            )
            step.rows = tuple(rows)

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if (
            is_of_torch
            or told.kind != "all_reduce"
            or facts.size < 3
            or len(told.ranks) < 2
        ):
            return
        step, ranks = self._step[facts.rank], tuple(told.ranks)
        if any(address_of(tensor) in facts.addresses for tensor in told.gives):
            step.reduced.setdefault(ranks, here())
        elif exchanging_function_here() is not None:
            step.exchanged.setdefault(ranks, here())

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if facts.size < 3 or len(self._mixed[facts.rank]) >= _ENOUGH_STEPS:
            return
        step = self._step.pop(facts.rank, _Step())
        if len(step.exchanged) != 1 or len(step.reduced) != 1 or step.read_at is None:
            self._right.add(facts.rank)
            return
        ((divides, added_at),), ((reduces, reduced_at),) = (
            step.exchanged.items(),
            step.reduced.items(),
        )
        if set(divides) & set(reduces) != {facts.rank}:
            self._right.add(facts.rank)
            return
        self._rows[divides, facts.steps][facts.rank] = step.rows
        self._mixed[facts.rank].append(
            _Mixed(divides, reduces, (added_at, reduced_at, step.read_at))
        )

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[tuple[Place, ...], Finding | None] = {}
        for rank, mixed in sorted(self._mixed.items()):
            if (
                len(mixed) >= _ENOUGH_STEPS
                and rank not in self._right
                and self._have_other_rows(mixed[0].divides)
            ):
                found.setdefault(mixed[0].places, _finding(mixed[0]))
        return list(found.values())

    def _have_other_rows(self, divides: Group) -> bool:
        """Whether no two ranks of a group have drawn the same rows in any step."""
        steps = [rows for (group, _), rows in self._rows.items() if group == divides]
        return all(
            len(rows) == len(set(rows.values())) == len(divides) for rows in steps
        )


def _finding(mixed: _Mixed) -> Finding | None:
    added_at, reduced_at, read_at = mixed.places
    return finding(
        "divided-model-of-other-rows",
        f"Ranks {listed_ranks(mixed.divides)} add up activations ({added_at}), as "
        "ranks that divide a model do, and each gets other rows: the "
        f"DistributedSampler of the loader ({read_at}) deals them out to all ranks. "
        f"Gradients are reduced among ranks {listed_ranks(mixed.reduces)} only "
        f"({reduced_at}).",
        "Give the ranks that divide a model the same rows, with the group whose ranks "
        "reduce gradients: `DistributedSampler(data, "
        "num_replicas=dist.get_world_size(group), rank=dist.get_rank(group))`.",
        [added_at, reduced_at, read_at],
    )
