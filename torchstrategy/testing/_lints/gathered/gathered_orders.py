"""Rows gathered rank after rank, and compared with others in the data's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import attribute, length_of, named_in
from torchstrategy.testing._lints.evidence.facts import Facts, tensors_in
from torchstrategy.testing._lints.evidence.fingerprints import (
    Fingerprint,
    can_be_read,
    fingerprint,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.known import Known
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._ranks.witnesses import Told
from torchstrategy.testing._simulation.program import unwatched

_MOST_NUMBERS = 4_000_000  # of a column
_COLLECTIVES = ("all_gather", "gather")
_aten = torch.ops.aten
# What leaves each row at its place. Views are known by their memory.
_PASSING = (
    *(
        _aten.clone.default,
        _aten._to_copy.default,
        _aten.sigmoid.default,
        _aten.exp.default,
        _aten.gt.Scalar,
    ),
    *(
        _aten._softmax.default,
        _aten._log_softmax.default,
        _aten.argmax.default,
        _aten.max.dim,
        _aten.ge.Scalar,
    ),
)
# What compares the rows of its first two arguments, each with the one at the same
# place.
_COMPARING = (
    *(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default),
    *(
        _aten.binary_cross_entropy.default,
        _aten.binary_cross_entropy_with_logits.default,
    ),
    *(_aten.nll_loss_forward.default, _aten.nll_loss.default),
    *(_aten.eq.Tensor, _aten.ne.Tensor, _aten.sub.Tensor),
)


@final
@dataclass(eq=False)
class _Read:
    """A loader that a rank reads to its end.

    Attributes:
        loader: It.
        place: Where.
        rows: The numbers of its rows, so far.
    """

    loader: Any
    place: Place
    rows: list[int] = field(default_factory=list)


class _Gathered(NamedTuple):
    """All ranks' rows: where their loaders were read, and where they were gathered."""

    read: Place
    place: Place
    rows: int  # of each rank
    ranks: int
    columns: frozenset[Fingerprint]  # of what the data set has in its order


class _Piece(NamedTuple):
    """Memory that has those rows, of one rank or of all.

    If `number` is None, it has those of all, rank after rank.
    """

    gathered: _Gathered
    number: int | None


@final
class GatheredOrders(Lint):
    """Looks for what a rank gathers after it has read every n-th row of a data set.

    `DistributedSampler` deals rows so.

    What it is compared with has to be a column of this data set, with the numbers in
    the same order.
    """

    def __init__(self) -> None:
        self._read: dict[int, _Read] = {}
        self._pieces: dict[int, Known[_Piece]] = defaultdict(Known)
        self._found: dict[Place, _Gathered] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        seen: dict[Any, Seen] = dict.fromkeys(_PASSING, self._passes) | dict.fromkeys(
            _COMPARING, self._compares
        )
        seen |= dict.fromkeys(
            (_aten.copy_.default, _aten.index_put_.default), self._overwrites
        )
        return seen | {_aten.cat.default: self._joins, _aten.stack.default: self._joins}

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        if facts.size > 1:
            self._read[facts.rank] = _Read(loader, here())

    @override
    def drew(self, facts: Facts, loader: Any, rows: Any) -> None:
        read = self._read.get(facts.rank)
        if read is not None and read.loader is loader and rows is not None:
            read.rows += rows if isinstance(rows, (list, tuple)) else [rows]

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._read.pop(facts.rank, None)

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        read, ranks = self._read.get(facts.rank), len(told.ranks)
        for one in told.gets:
            self._pieces[facts.rank].drop(one)
        if (
            read is None
            or told.kind not in _COLLECTIVES
            or len(told.gets) != ranks
            or ranks < 2
        ):
            return
        if not all(map(can_be_read, told.gets)):
            return
        columns = _columns(read, ranks, list(told.ranks).index(facts.rank))
        if not columns:
            return
        gathered = _Gathered(
            read.place, here(), len(read.rows), ranks, frozenset(columns)
        )
        pieces = self._pieces[facts.rank]
        is_one = len({one.untyped_storage().data_ptr() for one in told.gets}) == 1
        for index, one in enumerate(told.gets):
            pieces.put(one, _Piece(gathered, None if is_one else index))

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "rows-in-other-order",
                f"The rows that are gathered at {one.place} are compared with numbers "
                f"in the order of the data ({place}), but come rank after rank: the "
                f"sampler of the loader ({one.read}) deals rows out in turn. The "
                f"second of {one.rows * one.ranks} gathered rows is row {one.ranks} of "
                "the data, counted from 0, and is compared with row 1.",
                "Put them into the order of the data, `torch.stack(parts, "
                "1).flatten(0, 1)`, or gather the targets in the same way.",
                list(dict.fromkeys([place, one.place, one.read])),
            )
            for place, one in self._found.items()
        ]

    def _joins(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        pieces = self._pieces.get(facts.rank)
        if not pieces or (args[1] if len(args) > 1 else kwargs.get("dim", 0)) != 0:
            return
        joined = [pieces.get(one) for one in args[0]]
        first = joined[0] if joined else None
        if first is None or [one and one.number for one in joined] != list(
            range(first.gathered.ranks)
        ):
            return
        if all(one is not None and one.gathered is first.gathered for one in joined):
            pieces.put(result, _Piece(first.gathered, None))

    def _passes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        pieces = self._pieces.get(facts.rank)
        piece = pieces.get(args[0]) if pieces else None
        if pieces is None or piece is None or not _is_from_the_first(args[0]):
            return
        for made in tensors_in((result,)):
            if _rows_of(made) == _rows_of(args[0]):
                pieces.put(made, piece)

    def _overwrites(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if facts.rank in self._pieces:
            self._pieces[facts.rank].drop(args[0])

    def _compares(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        pieces = self._pieces.get(facts.rank)
        if not pieces or not all(isinstance(one, torch.Tensor) for one in args[:2]):
            return
        for mine, other in (args[:2], args[1::-1]):
            piece = pieces.get(mine)
            if piece is None or _rows_of(mine) != _rows_of(other):
                continue
            if _print_of(other) in piece.gathered.columns:
                self._found.setdefault(here(), piece.gathered)


def _rows_of(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _is_from_the_first(tensor: torch.Tensor) -> bool:
    """Whether the rows of a tensor are those of its memory, in order.

    What is turned around or taken apart is not.
    """
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def _print_of(tensor: torch.Tensor) -> Fingerprint | None:
    """A fingerprint of rows, whether each is a number or a list of one number."""
    if not can_be_read(tensor) or tensor.numel() > _MOST_NUMBERS:
        return None
    here = numbers_of(tensor)
    with unwatched(), without_modes():
        return fingerprint(here.flatten() if here.numel() == len(here) else here)


def _columns(read: _Read, ranks: int, rank: int) -> set[Fingerprint]:
    """What the data set of a loader has in its order.

    It matters if a rank has read every n-th row, and if the order counts.
    """
    dataset = read.loader.dataset
    size = length_of(dataset)
    if size is None or not all(isinstance(row, (int, np.integer)) for row in read.rows):
        return set()
    own = range(rank, size, ranks)
    if len(read.rows) < len(own) or any(
        row != other for row, other in zip(read.rows, own, strict=False)
    ):
        return set()  # the last rows of some ranks are padding
    tensors = attribute(dataset, "tensors")
    held = (
        tensors
        if isinstance(tensors, (tuple, list))
        else tuple(named_in(dataset).values())
    )
    found: set[Fingerprint] = set()
    for value in held:
        column = _tensor_of(value, size)
        if column is None:
            continue
        with unwatched(), without_modes():
            turned = torch.cat([column[first::ranks] for first in range(ranks)])
        print, other = _print_of(column), _print_of(turned)
        if print is not None and print != other:
            found.add(print)
    return found


def _tensor_of(value: Any, size: int) -> torch.Tensor | None:
    """A column of a data set as a tensor; None of what is none."""
    if not isinstance(value, torch.Tensor):
        is_list = (
            isinstance(value, list)
            and len(value) == size
            and all(type(one) in (int, float) for one in value)
        )
        if not is_list and type(value) is not np.ndarray:
            return None
        with unwatched(), without_modes():
            try:
                value = torch.as_tensor(value)
            except (TypeError, ValueError):  # an array of words
                return None
    is_column = (
        can_be_read(value)
        and value.dim() > 0
        and len(value) == size
        and value.numel() <= _MOST_NUMBERS
    )
    return numbers_of(value) if is_column else None
