"""Rows that a program cuts into batches itself, and that two ranks have in common."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, Model
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    fingerprint,
    has_ordinary_numbers,
    hashes_of_rows,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.known import Known, is_plain, version_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.rows.orders import (
    are_of_other_orders,
    without_repeats,
)
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_MOST_ROWS = 20_000
_MOST_OF_A_STEP = 4096  # larger tensors are no batches
_MOST_HASHED = 3 * _MOST_ROWS  # also those that are in no step
_FEWEST_NUMBERS = 4  # of a row: shorter ones, as labels, are alike by chance
_FEWEST_STEPS = 4  # before a row comes again: rows of one step may be drawn together
_aten = torch.ops.aten


class _Feed(NamedTuple):
    """Where a program brings rows to its device, or to its model.

    It says which of the tensors of a step has them.
    """

    place: Place
    number: int


@final
class FedRows(Lint):
    """Compares the rows that ranks bring to their devices or models in each step.

    It does if no loader has numbers of them.

    Each rank has to take its part of one order of all rows.
    """

    def __init__(self) -> None:
        # By rank, since its last step.
        self._since: dict[int, dict[_Feed, list[int]]] = defaultdict(dict)
        self._counts: dict[int, Counter[Place]] = defaultdict(Counter)
        self._usual: dict[int, Counter[Place]] = {}  # of the first step
        self._rows: dict[_Feed, dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._most: Counter[_Feed] = Counter()  # the most rows that a step brings
        self._hashed: Counter[int] = Counter()  # rows, by rank
        # The version and the numbers of tables.
        self._tables: dict[int, Known[tuple[int, int]]] = defaultdict(Known)
        self._companions: tuple[int, ...] = ()
        self._has_numbers = False

    @override
    def operators(self) -> dict[Any, Seen]:
        chooses: dict[Any, Seen] = {
            _aten.index.Tensor: self._chooses,
            _aten.index_select.default: self._selects,
        }
        return {_aten._to_copy.default: self._copies, **chooses}

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        self._has_numbers = True  # `Rows` knows which rows they are

    @override
    def calls(self, facts: Facts, model: Model, args: Sequence[Any]) -> None:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:
                self._feeds(facts, tensor)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        counts, since = (
            self._counts.pop(facts.rank, Counter()),
            self._since.pop(facts.rank, {}),
        )
        companions = facts.companions()
        has_reduced_all = bool(facts.called) or all(
            address in facts.reduced for address in facts.addresses
        )
        if len(companions) < 2 or not has_reduced_all:
            return
        self._companions = companions
        usual = self._usual.setdefault(facts.rank, counts)
        for feed, rows in since.items():
            known = self._rows[feed][facts.rank]
            # If there were more, some were for an evaluation.
            if counts[feed.place] == usual[feed.place] and len(known) < _MOST_ROWS:
                known += rows
                self._most[feed] = max(self._most[feed], len(rows))

    @override
    def findings(self) -> list[Finding | None]:
        if self._has_numbers:
            return []
        for feed, by_rank in self._rows.items():
            ranks = [rank for rank in self._companions if rank in by_rank]
            for rank in ranks[1:]:
                mine, theirs = by_rank[ranks[0]], by_rank[rank]
                count = min(without_repeats(mine), without_repeats(theirs))
                mine, theirs = mine[:count], theirs[:count]
                # `Generators` names the same rows in the same order.
                is_wrong = mine != theirs and are_of_other_orders(
                    mine, theirs, len(self._companions)
                )
                if is_wrong and count >= _FEWEST_STEPS * self._most[feed]:
                    # The same rows may come to the model later: one finding says it.
                    return [
                        _finding(
                            feed.place,
                            (ranks[0], rank),
                            count,
                            len(set(mine) & set(theirs)),
                        )
                    ]
        return []

    def _copies(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = args[0]
        # In `vmap`, the 2 of `x * 2` is copied, too.
        if not isinstance(given, torch.Tensor):
            return
        is_weight = isinstance(given, nn.Parameter) or given.requires_grad
        if (
            facts.size > 1
            and not is_weight
            and given.device.type == "cpu"
            and result.device != given.device
        ):
            self._feeds(facts, given)

    def _chooses(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if len(args[1]) == 1 and args[1][0] is not None:
            self._takes(facts, args[0], args[1][0])

    def _selects(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if args[1] == 0:
            self._takes(facts, args[0], args[2])

    def _takes(self, facts: Facts, table: torch.Tensor, numbers: torch.Tensor) -> None:
        """Rows of a table are taken by their numbers.

        It counts if all ranks have this table.
        """
        is_data = (
            facts.size > 1
            and not isinstance(table, nn.Parameter)
            and not table.requires_grad
        )
        are_rows = (
            numbers.dim() == 1 and numbers.dtype is torch.int64 and can_be_read(numbers)
        )
        if (
            not is_data
            or not are_rows
            or not table.dim()
            or len(numbers) >= len(table)
            or not can_be_read(table)
        ):
            return
        if not self._is_asked(facts, numbers):
            return
        known = self._tables[facts.rank].get(table)
        if known is None or known[0] != version_of(table):
            known = version_of(table), hash(fingerprint(table))
            self._tables[facts.rank].put(table, known)
        rows = numbers_of(numbers)
        with unwatched(), without_modes():
            self._note(facts, [hash((known[1], row)) for row in rows.tolist()])

    def _is_asked(self, facts: Facts, rows: torch.Tensor) -> bool:
        is_full = self._hashed[facts.rank] > _MOST_HASHED
        is_of_a_step = not self._has_numbers and facts.stepping is None
        return is_of_a_step and not is_full and 2 <= len(rows) <= _MOST_OF_A_STEP

    def _feeds(self, facts: Facts, tensor: torch.Tensor) -> None:
        if (
            not is_plain(tensor)
            or tensor.dim() < 2
            or not self._is_asked(facts, tensor)
        ):
            return
        if math.prod(tensor.shape[1:]) >= _FEWEST_NUMBERS and has_ordinary_numbers(
            tensor
        ):
            self._note(facts, hashes_of_rows(tensor))

    def _note(self, facts: Facts, rows: list[int]) -> None:
        place = here()
        counts = self._counts[facts.rank]
        feed = _Feed(place, counts[place])
        counts[place] += 1
        if len(self._rows[feed][facts.rank]) < _MOST_ROWS:
            self._hashed[facts.rank] += len(rows)
            self._since[facts.rank][feed] = rows


def _finding(
    place: Place, ranks: tuple[int, int], count: int, common: int
) -> Finding | None:
    return finding(
        "same-rows",
        f"Of the first {count} rows that each of ranks {ranks[0]} and {ranks[1]} "
        f"trains with ({place}), none of them twice, they have {common} in common: "
        "each rank draws an order of its own.",
        "Draw one order for all ranks, from a generator with a seed of the epoch "
        "alone, and let each rank take its part of that: `order[rank::ranks]`.",
        [place],
    )
