"""Contrastive losses whose targets are rows that another rank has gathered.

They lack the offset of the rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch.nn import functional as F
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read, numbers_of
from torchstrategy.testing._lints.evidence.losses import is_passed
from torchstrategy.testing._lints.evidence.nodes import name_of
from torchstrategy.testing._lints.evidence.places import Place, here, way_here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._ranks.witnesses import Told
from torchstrategy.testing._simulation.program import unwatched

_MOST_KEPT, _MOST_ELEMENTS, _MOST_NODES, _ENOUGH_RIGHT = 8, 500_000, 200, 3
_CLOSE = 0.02  # rows of length 1 may be in half precision
# What may be between a product and a loss, besides what changes no number: a
# temperature, and the softmax itself.
_BETWEEN = ("LogSoftmaxBackward", "MulBackward", "DivBackward")


@final
@dataclass
class _Kept:
    """What ranks have given to one `all_gather`: rows of length 1, by rank."""

    ranks: tuple[int, ...]
    place: Place
    given: dict[int, torch.Tensor] = field(default_factory=dict)


class _Targets(NamedTuple):
    """Rows that a loss takes as targets, one after the other.

    With them is the node of the numbers that it compares.
    """

    first: int
    size: int
    node: Any


@final
class Positives(Lint):
    """Keeps what ranks gather, and looks whose rows the targets of a loss are.

    It keeps it until a loss is made of it.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        self._right: dict[tuple[int, Place], int] = {}
        # Of a loss, once, however many terms it has.
        self._found: dict[Place, tuple[str, Place]] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if told.kind != "all_gather" or len(told.gives) != 1 or len(told.ranks) < 2:
            return
        mine = told.gives[0]
        is_of_rows = (
            mine.dim() == 2
            and mine.is_floating_point()
            and 0 < mine.numel() <= _MOST_ELEMENTS
        )
        if not is_of_rows or not can_be_read(mine):
            return
        if told.key not in self._kept and len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        kept = self._kept.setdefault(told.key, _Kept(tuple(told.ranks), way_here()[0]))
        kept.given[told.rank] = _directions(mine)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        kept = [
            one
            for one in self._kept.values()
            if facts.rank in one.given and len(one.given) == len(one.ranks)
        ]
        if not kept:
            return
        place = here()
        if self._right.get((facts.rank, place), 0) >= _ENOUGH_RIGHT:
            return
        right, wrong = 0, []
        for targets in _targets_of(losses):
            rows = _compared_with(targets.node, kept)
            for one in kept if rows is not None else ():
                fault = _fault(facts.rank, one, targets, rows, place)
                right += fault == ""
                wrong += [(fault, one.place)] if fault else []
        if right:  # then the other terms of the loss may be for the rows of each rank
            self._right[facts.rank, place] = (
                self._right.get((facts.rank, place), 0) + right
            )
        elif wrong:
            self._found.setdefault(place, wrong[0])

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        for key, kept in list(self._kept.items()):
            kept.given.pop(facts.rank, None)
            if not kept.given:
                del self._kept[key]

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "positives-of-another-rank",
                says,
                "Add the offset of the rank to the targets: `torch.arange(n) + "
                "dist.get_rank() * n`.",
                list(dict.fromkeys([gathered, place])),
            )
            for place, (says, gathered) in self._found.items()
        ]


def _fault(
    rank: int, kept: _Kept, targets: _Targets, rows: Any, place: Place
) -> str | None:
    """What is wrong with the targets of a rank; nothing if they are its own rows.

    It is None if nobody can say.
    """
    first, count, mine = targets.first, targets.size, kept.given[rank]
    size = len(mine)
    starts = [
        start
        for start in range(0, len(rows) - size + 1, size)
        if _are_alike(rows, start, mine)
    ]
    if not starts or count > size:
        return None
    if any(start <= first < start + size for start in starts):
        return ""
    # The rows may stand beside others, which this rank has not gathered: only those of
    # another rank are wrong.
    for other in kept.ranks:
        its = kept.given[other]
        part = its[first % len(its) : first % len(its) + count]
        if other != rank and len(part) == count and _are_alike(rows, first, part):
            return (
                f"On rank {rank}, the loss ({place}) compares its rows with "
                f"{len(rows)} that all ranks have gathered ({kept.place}). Its targets "
                f"are rows {first} to {first + count - 1}, those of rank {other}; its "
                f"own are {starts[0]} to {starts[0] + size - 1}."
            )
    return None


def _directions(rows: torch.Tensor) -> torch.Tensor:
    here = numbers_of(rows)
    with torch.no_grad(), unwatched(), without_modes():
        return F.normalize(here.float(), dim=1)


def _are_alike(rows: torch.Tensor, start: int, part: torch.Tensor) -> bool:
    there = rows[start : start + len(part)]
    with torch.no_grad(), unwatched(), without_modes():
        return there.shape == part.shape and bool((there - part).abs().max() < _CLOSE)


def _targets_of(losses: Sequence[torch.Tensor]) -> Iterator[_Targets]:
    """The targets of the losses that a sum is made of.

    They are rows one after the other.
    """
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        targets = None
        if name_of(node).startswith("NllLossBackward"):
            targets = _of_cross_entropy(node)
        elif name_of(node).startswith("DiagonalBackward"):
            sizes = node._saved_self_sym_sizes
            offset = node._saved_offset  # an unsigned number
            if len(sizes) == 2 and offset < sizes[1]:
                targets = _Targets(
                    int(offset),
                    int(min(sizes[0], sizes[1] - offset)),
                    node.next_functions[0][0],
                )
        if targets is not None:
            yield targets
        waiting += [following for following, _ in node.next_functions]


def _of_cross_entropy(node: Any) -> _Targets | None:
    try:
        target = node._saved_target
    except RuntimeError:  # it is freed
        return None
    if target.dim() != 1 or target.numel() < 2 or not can_be_read(target):
        return None
    numbers = numbers_of(target)
    with unwatched(), without_modes():
        first = int(numbers[0])
        are_in_order = numbers.tolist() == list(range(first, first + len(numbers)))
    return (
        _Targets(first, len(numbers), node.next_functions[0][0])
        if are_in_order
        else None
    )


def _compared_with(node: Any, kept: Sequence[_Kept]) -> torch.Tensor | None:
    """The rows, of length 1, with whose products a loss begins.

    It is None if the loss is made of something else.
    """
    waiting = [node]
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        node = waiting.pop()
        if node is None:
            continue
        if name_of(node).startswith("MmBackward"):
            try:
                other = node._saved_mat2
            except RuntimeError:  # it is freed
                return None
            is_of_gathered = isinstance(other, torch.Tensor) and can_be_read(other)
            if not is_of_gathered or all(
                other.shape[0] != one.given[one.ranks[0]].shape[1] for one in kept
            ):
                return None
            return _directions(other.detach().t())
        if is_passed(node) or name_of(node).startswith(_BETWEEN):
            waiting += [following for following, _ in node.next_functions]
    return None
