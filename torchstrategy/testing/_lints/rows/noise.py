"""Random numbers that all ranks draw alike, and put together with rows that differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, tensors_in
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    checksum,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.pieces import Pieces
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower, Seen

_MOST, _MOST_USES, _ENOUGH, _TWICE = 4, 4, 16, 2
_LONGEST = 1000  # operators
_aten = torch.ops.aten
_DRAWING = (
    _aten.randn.default,
    _aten.randn.generator,
    _aten.normal_.default,
    _aten.normal.float_float,
)
# What combines numbers one by one.
_COMBINING = (
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "lerp",
    "addcmul",
    "addcdiv",
    "where",
    "mse_loss",
    "huber_loss",
)
# What makes each number of many, though there may be as many as before.
_MIXING = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "linear",
    "embedding",
    "cumsum",
    "sort",
)


class _Draw(NamedTuple):
    """What a rank draws at a place, for the first time, the second time, and so on."""

    place: Place
    number: int


class _Use(NamedTuple):
    """Checksums of what was drawn, or made of that, and of what it is combined with."""

    drawn: int
    other: int


@final
class Noise(Follower):
    """Follows normal noise that ranks draw before `backward`.

    It does until it is put together with a tensor of its shape.

    Ranks may draw the same numbers on purpose, as for all rows of all ranks, of which
    each takes its own: what a rank uses differs then. Nor is it a mistake to change
    weights by the same numbers on all ranks, which are alike.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Pieces[_Draw]] = {}
        self._times: Counter[tuple[int, Place]] = Counter()
        self._uses: dict[tuple[Place, int], dict[int, list[_Use]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._lengths: dict[Place, int] = {}
        # Operators since the last draw, by rank.
        self._followed: Counter[int] = Counter()
        self._companions: tuple[int, ...] = ()

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(_DRAWING, self._draws)

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        pieces = self._pieces[facts.rank]
        self._followed[facts.rank] += 1
        if self._followed[facts.rank] > _LONGEST:
            del self._pieces[facts.rank]
            return
        if func.overloadpacket.__name__.rstrip("_") in _COMBINING and isinstance(
            result, torch.Tensor
        ):
            together = [
                one
                for one in tensors_in(args)
                if one.shape == result.shape and one.numel() >= _ENOUGH
            ]
            found = [pieces.find(one) for one in together]
            draw = next((one for one in found if one is not None), None)
            if draw is not None and None in found:
                drawn = next(
                    one
                    for one, fact in zip(together, found, strict=True)
                    if fact is not None
                )
                self._note(facts, draw, drawn, together[found.index(None)])
        if _keeps_numbers(func, args, result):
            pieces.follow(func, args, kwargs, result)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._pieces.pop(facts.rank, None)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._pieces.pop(facts.rank, None)
        if len(facts.companions()) > 1:
            self._companions = facts.companions()

    @override
    def findings(self) -> list[Finding | None]:
        by_place: dict[Place, list[set[int] | None]] = defaultdict(list)
        for (place, _), by_rank in self._uses.items():
            if self._companions and set(by_rank) >= set(self._companions):
                by_place[place].append(
                    _alike([by_rank[rank] for rank in self._companions])
                )
        return [
            self._finding(place)
            for place, draws in by_place.items()
            if len(draws) >= _TWICE
            and None not in draws
            and len(set.union(*filter(None, draws))) >= _TWICE
        ]

    def _draws(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        # What is drawn after `backward` is for gradients or weights. Single numbers
        # choose how rows are changed.
        if (
            facts.size < 2
            or facts.backwards
            or facts.stepping is not None
            or isinstance(result, nn.Parameter)
        ):
            return
        if result.numel() < _ENOUGH or not can_be_read(result):
            return
        place = here()
        number = self._times[facts.rank, place]
        self._times[facts.rank, place] += 1
        if number < _MOST:
            self._followed[facts.rank] = 0
            self._lengths.setdefault(place, result.numel())
            self._pieces.setdefault(facts.rank, Pieces()).add(
                result, _Draw(place, number)
            )

    def _note(
        self, facts: Facts, draw: _Draw, drawn: torch.Tensor, other: torch.Tensor
    ) -> None:
        uses = self._uses[draw.place, draw.number][facts.rank]
        if len(uses) < _MOST_USES and can_be_read(drawn) and can_be_read(other):
            uses.append(_Use(checksum(numbers_of(drawn)), checksum(numbers_of(other))))

    def _finding(self, place: Place) -> Finding | None:
        return finding(
            "random-numbers-alike",
            f"All {len(self._companions)} ranks draw the same {self._lengths[place]} "
            f"numbers at {place}, each time, and put them together with rows that "
            "differ: their generators have the same seed.",
            "Draw them from a generator with a seed of the rank: "
            "`torch.Generator().manual_seed(seed + rank)`, or call "
            "`torch.manual_seed(seed + rank)` after the model is built.",
            [place],
        )


def _keeps_numbers(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether a result has as many numbers as an operand, and none mixes many."""
    name = func.overloadpacket.__name__
    if (
        not isinstance(result, torch.Tensor)
        or name in _MIXING
        or name.startswith("new_")
        or name.endswith("_like")
    ):
        return False
    return name in ("cat", "stack") or any(
        one.numel() == result.numel() for one in tensors_in(args)
    )


def _alike(uses: Sequence[Sequence[_Use]]) -> set[int] | None:
    """What all ranks have drawn alike, and put together with other numbers.

    It is None if that was not so.
    """
    for those in zip(*uses, strict=False):
        if len({use.drawn for use in those}) == 1 and len(
            {use.other for use in those}
        ) == len(those):
            return {those[0].drawn}
    return None
