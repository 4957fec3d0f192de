"""Random numbers that are alike on ranks where they should differ.

They are those of dropout, and of rows that are chosen at random.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, Model, address_of
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    checksum,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.known import Known
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen

_MOST, _ENOUGH, _TWICE = 3, 16, 2
_aten = torch.ops.aten


class _Drawn(NamedTuple):
    """What a rank has drawn: sums of its bytes."""

    place: Place
    numbers: int
    source: int  # of what rows were chosen
    length: int


@final
class Generators(Lint):
    """Compares what ranks draw at the same places in models that DDP trains.

    That is `DistributedDataParallel`.
    """

    def __init__(self) -> None:
        # By place and number, and by rank.
        self._masks: dict[tuple[str, int], dict[int, _Drawn]] = defaultdict(dict)
        self._noise: dict[tuple[str, int], dict[int, _Drawn]] = defaultdict(dict)
        self._rows: dict[tuple[str, int], dict[int, _Drawn]] = defaultdict(dict)
        self._inputs: dict[tuple[Any, int], dict[int, int]] = defaultdict(dict)
        # By model and rank: where.
        self._called: dict[Any, dict[int, Place]] = defaultdict(dict)
        self._has_loaders = False
        self._times: Counter[tuple[int, Any]] = Counter()
        self._indices: dict[int, Known[bool]] = defaultdict(Known)
        self._companions: tuple[int, ...] = ()

    @override
    def operators(self) -> dict[Any, Seen]:
        seen: dict[Any, Seen] = {
            _aten.native_dropout.default: self._drops,
            _aten.bernoulli_.float: self._drops,
        }
        seen |= {
            _aten.randn_like.default: self._adds_noise,
            _aten.rand_like.default: self._adds_noise,
        }
        choosing = [
            _aten.randint.default,
            _aten.randint.low,
            _aten.randperm.default,
            _aten.randperm.generator,
        ]
        choosing += [
            _aten.randint.generator,
            _aten.randint.low_generator,
            _aten.multinomial.default,
        ]
        seen |= {op: self._chooses for op in choosing}
        seen[_aten._to_copy.default] = self._passes
        return seen | {
            _aten.index.Tensor: self._takes,
            _aten.index_select.default: self._selects,
        }

    @override
    def calls(self, facts: Facts, model: Model, args: Sequence[Any]) -> None:
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if any(one.requires_grad for one in given):
            return  # what another part of the model has made
        readable = [one for one in given if can_be_read(one)]
        if readable and (number := self._next(facts.rank, model.key)) < _MOST:
            self._inputs[model.key, number][facts.rank] = hash(
                tuple(checksum(numbers_of(one)) for one in readable)
            )
            self._called[model.key][facts.rank] = here()

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        self._has_loaders = True

    @override
    def got(self, facts: Facts, loader: Any, batch: Any) -> None:
        self._has_loaders = True

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if len(facts.companions()) > 1:
            self._companions = facts.companions()

    @override
    def findings(self) -> list[Finding | None]:
        if not self._companions:
            return []
        found: list[Finding | None] = []
        has_other_inputs = any(
            len(set(those.values())) > 1 for those in self._inputs.values()
        )
        if has_other_inputs and (masks := self._alike(self._masks, 1)):
            found.append(_of_masks(masks, len(self._companions)))
        if has_other_inputs and (noise := self._alike(self._noise, _TWICE)):
            found.append(_of_noise(noise, len(self._companions)))
        # What is alike may be a part of what a model gets, such as points at which all
        # rows are looked at.
        rows = [] if has_other_inputs else self._alike(self._rows, _TWICE)
        found += [_of_rows(one, len(self._companions)) for one in rows]
        # With loaders, rows that are alike in all models are those of a loader, which
        # `Rows` and `Streams` name.
        if not rows and (not self._has_loaders or has_other_inputs):
            found += [
                _of_inputs(places)
                for key, places in self._called.items()
                if self._are_alike(key)
            ]
        return found

    def _are_alike(self, key: Any) -> bool:
        """Whether all ranks that train a model call it with the same rows.

        They do so each time with other ones.
        """
        sums = [self._inputs[key, number] for number in range(_MOST)]
        ranks = set(self._called[key])
        are_there = len(ranks) > 1 and all(set(those) == ranks for those in sums)
        each = [set(those.values()) for those in sums]
        return (
            are_there
            and all(len(one) == 1 for one in each)
            and len(set.union(*each)) == _MOST
        )

    def _alike(
        self, drawn: dict[tuple[str, int], dict[int, _Drawn]], least: int
    ) -> list[_Drawn]:
        """The places at which all ranks have drawn the same, each time."""
        by_place: dict[Place, list[bool]] = defaultdict(list)
        first: dict[Place, _Drawn] = {}
        for those in drawn.values():
            if set(those) >= set(self._companions):
                mine = [those[rank] for rank in self._companions]
                first.setdefault(mine[0].place, mine[0])
                is_alike = len({(one.numbers, one.source) for one in mine}) == 1
                by_place[mine[0].place].append(is_alike)
        return [
            first[place]
            for place, alike in by_place.items()
            if all(alike) and len(alike) >= least
        ]

    def _next(self, rank: int, key: Any) -> int:
        self._times[rank, key] += 1
        return self._times[rank, key] - 1

    def _drops(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        mask = result[1] if isinstance(result, (tuple, list)) else result
        if (
            facts.size < 2
            or mask.numel() < _ENOUGH
            or not can_be_read(mask)
            or not facts.called
        ):
            return
        place = here()
        number = self._next(facts.rank, ("mask", place))
        if number < _MOST:
            numbers = numbers_of(mask)
            if not bool(numbers.bool().all()) and bool(numbers.any()):
                self._masks[str(place), number][facts.rank] = _Drawn(
                    place, checksum(numbers), 0, mask.numel()
                )

    def _adds_noise(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if facts.size < 2 or result.numel() < _ENOUGH or not can_be_read(result):
            return
        if facts.backwards or address_of(args[0]) in {
            address_of(one) for one in facts.parameters()
        } - {0}:
            return  # noise for gradients and weights has to be alike
        place = here()
        number = self._next(facts.rank, ("noise", place))
        if number < _MOST:
            drawn = _Drawn(place, checksum(numbers_of(result)), 0, result.numel())
            self._noise[str(place), number][facts.rank] = drawn

    def _chooses(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if facts.size > 1 and result.dtype is torch.int64 and result.numel() > 1:
            self._indices[facts.rank].put(result, True)

    def _passes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if self._indices[facts.rank].get(args[0]):
            self._indices[facts.rank].put(result, True)

    def _takes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if len(args[1]) == 1:
            self._note(facts, args[0], args[1][0])

    def _selects(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if args[1] == 0:
            self._note(facts, args[0], args[2])

    def _note(self, facts: Facts, source: torch.Tensor, index: torch.Tensor) -> None:
        """Notes which rows are chosen at random, if these are some of many.

        A shuffled batch has all of its rows.
        """
        if facts.size < 2 or not self._indices[facts.rank].get(index):
            return
        if (
            not source.dim()
            or index.numel() >= len(source)
            or not can_be_read(source)
            or not can_be_read(index)
        ):
            return
        place = here()
        number = self._next(facts.rank, ("rows", place))
        if number < _MOST:
            drawn = _Drawn(
                place,
                checksum(numbers_of(index)),
                checksum(numbers_of(source)),
                index.numel(),
            )
            self._rows[str(place), number][facts.rank] = drawn


def _of_masks(masks: list[_Drawn], ranks: int) -> Finding | None:
    places = list(dict.fromkeys(mask.place for mask in masks))
    return finding(
        "random-numbers-alike",
        f"All {ranks} ranks drop the same of {masks[0].length} numbers, each time, in "
        f"the model that is called at {in_words(places)}, of rows that differ: their "
        "generators have the same seed.",
        "Seed each rank differently after the model is built: `torch.manual_seed(seed "
        "+ rank)`.",
        places,
    )


def _of_noise(noise: list[_Drawn], ranks: int) -> Finding | None:
    places = list(dict.fromkeys(one.place for one in noise))
    return finding(
        "random-numbers-alike",
        f"All {ranks} ranks draw the same {noise[0].length} numbers at "
        f"{in_words(places)}, each time, for rows that differ: their generators have "
        "the same seed.",
        "Seed each rank differently after the model is built: `torch.manual_seed(seed "
        "+ rank)`.",
        places,
    )


def _of_rows(rows: _Drawn, ranks: int) -> Finding | None:
    return finding(
        "same-rows",
        f"All {ranks} ranks choose the same {rows.length} rows at random at "
        f"{rows.place}, each time: their generators have the same seed.",
        "Draw them from a generator with a seed of the rank: "
        "`torch.Generator().manual_seed(seed + rank)`.",
        [rows.place],
    )


def _of_inputs(places: dict[int, Place]) -> Finding | None:
    where = list(dict.fromkeys(places.values()))
    return finding(
        "same-rows",
        f"All {len(places)} ranks call the model that they train ({in_words(where)}) "
        "with the same rows, each time: what makes or chooses the rows has the same "
        "seed on all of them.",
        "Give each rank rows of its own: `torch.manual_seed(seed + rank)` after the "
        "model is built, or a part of the data.",
        where,
    )
