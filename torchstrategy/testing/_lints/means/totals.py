"""Totals that ranks add up again, with what they have added up before."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import (
    Fingerprint,
    few_numbers,
    fingerprint,
)
from torchstrategy.testing._lints.evidence.known import is_plain, version_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._ranks.witnesses import Told
from torchstrategy.testing._simulation.memory import span

_aten = torch.ops.aten
_DIVIDES = (_aten.div_.Tensor, _aten.div_.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar)


@dataclass(eq=False)
class _Total:
    """Memory that holds a sum over ranks, and what was added to it since then.

    Attributes:
        extent: Where the sum begins and ends in memory.
        ranks: Whose sum it is.
        place: Where it was made.
        version: How often the memory was written on, as torch counts, if nothing has
            happened but additions.
        has_numbers: Whether the rank has given something else than zeros.
        added: Where something was added; None while nothing was.
        storage: The memory, while it is there.
    """

    extent: tuple[int, int]
    ranks: tuple[int, ...]
    place: Place
    version: int
    has_numbers: bool
    added: Place | None = None
    storage: weakref.ref[Any] | None = None


class _Again(NamedTuple):
    """A sum that a rank gives to be added up again: which, where, and what it is."""

    total: _Total
    place: Place
    given: Fingerprint | None


@final
class Totals(Lint):
    """Follows sums over ranks until they are added up again.

    All ranks have to do so: some programs let one rank keep the sum, and the others
    begin with zero. The ranks have to give other numbers: else they may take the mean
    of what all have. Any writing that is no addition ends it, such as a division.
    """

    def __init__(self) -> None:
        # By rank and address of a storage.
        self._totals: dict[int, dict[int, list[_Total]]] = defaultdict(dict)
        # By collective and rank.
        self._again: dict[Hashable, dict[int, _Again]] = defaultdict(dict)
        self._found: dict[Place, _Again] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        adds = [
            _aten.add_.Tensor,
            _aten.add_.Scalar,
            _aten.index_add_.default,
            _aten.scatter_add_.default,
        ]
        seen: dict[Any, Seen] = {op: self._added for op in adds}
        # torch counts what is written on `tensor.data` as no write on the tensor.
        seen |= {
            op: self._ended
            for op in (_aten.zero_.default, _aten.fill_.Scalar, *_DIVIDES)
        }
        return seen | {_aten.copy_.default: self._copied, _aten.add.Tensor: self._made}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if (
            is_of_torch
            or told.kind != "all_reduce"
            or len(told.ranks) < 2
            or len(told.gives) != 1
        ):
            return
        (tensor,) = told.gives
        if not _has_version(tensor):
            return
        place, ranks = here(), tuple(told.ranks)
        before = self._of(facts.rank, tensor)
        for total in before:
            self._totals[facts.rank][tensor.untyped_storage().data_ptr()].remove(total)
        if told.detail != "sum":
            return
        for total in before:
            is_again = (
                total.added is not None
                and total.ranks == ranks
                and total.extent == span(tensor)
            )
            if is_again and _is_as_left(total, tensor):
                self._adds_up_again(told, _Again(total, place, fingerprint(tensor)))
        self._keep(
            facts.rank,
            tensor,
            _Total(
                span(tensor), ranks, place, version_of(tensor), _has_numbers(tensor)
            ),
        )

    def _adds_up_again(self, told: Told, again: _Again) -> None:
        of_ranks = self._again[told.key]
        of_ranks[told.rank] = again
        if len(of_ranks) < len(told.ranks):
            return
        del self._again[told.key]
        is_of_numbers = any(one.total.has_numbers for one in of_ranks.values())
        if is_of_numbers and len({one.given for one in of_ranks.values()}) > 1:
            self._found.setdefault(again.place, again)

    def _added(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Something was added to a tensor.

        Torch counts that it was written on only afterwards.
        """
        for total in self._of(facts.rank, args[0]):
            if _is_as_left(total, args[0]):
                total.version += 1
                total.added = here()

    def _ended(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A tensor is set to zero, or multiplied."""
        for total in self._of(facts.rank, args[0]):
            self._totals[facts.rank][args[0].untyped_storage().data_ptr()].remove(total)

    def _copied(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """`total[0] += 1` adds to a tensor's part, then writes this part on itself."""
        for total in self._of(facts.rank, args[0]):
            is_itself = (
                is_plain(args[1]) and args[1].numel() and span(args[0]) == span(args[1])
            )
            if is_itself and _is_as_left(total, args[0]):
                total.version += 1

    def _made(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """`total = total + 1` has the sum in other memory."""
        for total in self._of(facts.rank, args[0]):
            is_whole = (
                total.extent == span(args[0]) and args[0].numel() == result.numel()
            )
            if is_whole and _has_version(result) and _is_as_left(total, args[0]):
                made = replace(
                    total, extent=span(result), version=version_of(result), added=here()
                )
                self._keep(facts.rank, result, made)

    def _of(self, rank: int, tensor: Any) -> list[_Total]:
        """The sums that have memory of a tensor."""
        totals = self._totals.get(rank)
        if not totals or not _has_version(tensor):
            return []
        there = totals.get(tensor.untyped_storage().data_ptr())
        if not there:
            return []
        start, end = span(tensor)
        return [
            total
            for total in there
            if total.extent[0] < end and start < total.extent[1]
        ]

    def _keep(self, rank: int, tensor: torch.Tensor, total: _Total) -> None:
        storage, totals = tensor.untyped_storage(), self._totals[rank]
        address = storage.data_ptr()
        there = totals.get(address)
        if not there or there[0].storage is None or there[0].storage() is not storage:
            there = totals[address] = []
        total.storage = weakref.ref(
            storage, lambda gone: _forget(totals, address, there, gone)
        )
        there.append(total)

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(again.total, again.place) for again in self._found.values()]


def _finding(total: _Total, place: Place) -> Finding | None:
    assert total.added is not None  # else it would be the same sum
    ranks = len(total.ranks)
    return finding(
        "sum-added-up-again",
        f"The tensor of the `all_reduce` at {place} has the sum over {ranks} ranks of "
        f"an earlier one ({total.place}), to which each rank has added "
        f"({total.added}): the earlier sum counts {ranks} times now.",
        "Reduce a copy, `total = total.clone()`, and keep what each rank has added up "
        "for itself; or set it to zero after each `all_reduce`.",
        list(dict.fromkeys([place, total.place, total.added])),
    )


def _is_as_left(total: _Total, tensor: torch.Tensor) -> bool:
    """Whether nobody has written on a tensor since the lint has seen it."""
    return version_of(tensor) == total.version


def _has_version(tensor: Any) -> bool:
    """Whether torch counts how often a tensor is written on."""
    return is_plain(tensor) and tensor.numel() > 0 and not tensor.is_inference()


def _forget(
    totals: dict[int, list[_Total]], address: int, those: list[_Total], gone: Any
) -> None:
    if totals.get(address) is those:
        del totals[address]


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has others than zeros."""
    numbers = few_numbers(tensor)
    return numbers is None or any(numbers)  # large ones are hardly all zero
