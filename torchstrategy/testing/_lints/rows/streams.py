"""Data sets without numbers of rows, that give all ranks the same rows.

They may give them to all workers of a loader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    checksum,
    has_ordinary_numbers,
    hashes_of_rows,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_MOST, _ENOUGH = 8, 2
_MOST_ROWS, _FEWEST_ROWS, _FEWEST_NUMBERS = 256, 32, 4  # of a stream; of a row
_MOST_REPEATS, _MOST_MOVED = 0.05, 0.1
_DEEPEST = 6  # of a batch
_ROUNDS = 3  # of the workers of a loader, which give a batch each in turn


@final
@dataclass
class _Stream:
    """What a rank gets from a loader.

    Attributes:
        place: Where it is read.
        batches: Sums of the bytes of the first batches.
        rows: The first rows, each once.
        repeats: How many rows came again among these.
        is_over: Whether the first of them has come again.
        companions: The ranks that train the same model with them.
        workers: How many workers load them.
    """

    place: Place
    workers: int
    batches: list[int] = field(default_factory=list)
    rows: dict[int, None] = field(default_factory=dict)
    repeats: int = 0
    is_over: bool = False
    companions: tuple[int, ...] = ()

    def takes(self, tensors: list[torch.Tensor]) -> None:
        """Notes the rows of a batch, each with its part of all tensors.

        Short ones are alike by chance.
        """
        count = len(tensors[0]) if tensors[0].dim() else 0
        parts = [
            one
            for one in tensors
            if one.dim() and len(one) == count and has_ordinary_numbers(one)
        ]
        if (
            not count
            or len(parts) < len(tensors)
            or sum(one[0].numel() for one in parts) < _FEWEST_NUMBERS
        ):
            return
        for row in map(hash, zip(*map(hashes_of_rows, parts), strict=True)):
            # The next pass over the data set has begun.
            if row == next(iter(self.rows), None):
                self.is_over = True
            if self.is_over:
                return
            if row in self.rows:
                self.repeats += 1
            elif len(self.rows) < _MOST_ROWS:
                self.rows[row] = None


@final
class Streams(Lint):
    """Compares the first batches and rows of an `IterableDataset` that are divided.

    Ranks, and workers, divide it and get them.

    Rows that are drawn with replacement also come again on one rank, and count as no
    mistake.
    """

    def __init__(self) -> None:
        self._known: dict[int, Objects[Any, _Stream]] = defaultdict(Objects)
        self._in_order: dict[int, list[_Stream]] = defaultdict(list)
        self._last: dict[int, _Stream] = {}

    @override
    def got(self, facts: Facts, loader: Any, batch: Any) -> None:
        of_rank = self._known[facts.rank]
        if loader not in of_rank:
            of_rank[loader] = _Stream(here(), loader.num_workers)
            self._in_order[facts.rank].append(of_rank[loader])
        stream = self._last[facts.rank] = of_rank[loader]
        tensors = list(_tensors(batch))
        if tensors and len(stream.batches) < max(_MOST, _ROUNDS * stream.workers):
            stream.batches.append(
                hash(tuple(checksum(numbers_of(tensor)) for tensor in tensors))
            )
        if tensors and len(stream.rows) < _MOST_ROWS:
            stream.takes(tensors)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if facts.rank in self._last:
            self._last[facts.rank].companions = facts.companions()

    @override
    def findings(self) -> list[Finding | None]:
        found: list[Finding | None] = []
        first = min(self._in_order, default=0)
        for index, stream in enumerate(self._in_order.get(first, ())):
            others = [
                self._in_order.get(rank, [])
                for rank in stream.companions
                if rank != first
            ]
            alike = [
                those[index]
                for those in others
                if index < len(those) and _are_alike(stream, those[index])
            ]
            if alike and len(alike) == len(others):
                found.append(_finding(stream, len(others) + 1))
                continue
            common = [
                _common(stream, those[index]) for those in others if index < len(those)
            ]
            if common and None not in common and len(common) == len(others):
                found.append(
                    _finding_of_rows(
                        stream, len(others) + 1, *min(one for one in common if one)
                    )
                )
        every = [stream for those in self._in_order.values() for stream in those]
        doubled = {
            stream.place: stream for stream in every if _has_workers_alike(stream)
        }
        return found + [_finding_of_workers(stream) for stream in doubled.values()]


def _are_alike(stream: _Stream, other: _Stream) -> bool:
    count = min(len(stream.batches), len(other.batches))
    same = stream.batches[:count] == other.batches[:count]
    return (
        same
        and stream.place == other.place
        and len(set(stream.batches[:count])) >= _ENOUGH
    )


def _common(stream: _Stream, other: _Stream) -> tuple[int, int] | None:
    """How many of the first rows of a rank another one has, too, and of how many.

    It is None if they are few.
    """
    if stream.place != other.place or max(
        stream.repeats, other.repeats
    ) > _MOST_REPEATS * len(stream.rows):
        return None
    count = min(len(stream.rows), len(other.rows))
    at = {row: position for position, row in enumerate(islice(other.rows, count))}
    moved = [
        abs(at[row] - position)
        for position, row in enumerate(islice(stream.rows, count))
        if row in at
    ]
    if count < _FEWEST_ROWS or len(moved) <= count / 2:
        return None
    # A rank that goes through all rows in an order of its own may do so on purpose:
    # rows are moved by a third of all.
    has_one_order = sum(moved) < _MOST_MOVED * count * len(moved)
    return (len(moved), count) if has_one_order else None


def _has_workers_alike(stream: _Stream) -> bool:
    """Whether all workers give the same batches: one each, in turn."""
    count = stream.workers
    rounds = [
        stream.batches[at : at + count]
        for at in range(0, len(stream.batches) - count + 1, count or 1)
    ]
    each = [set(those) for those in rounds[:_ROUNDS]]
    return (
        count > 1
        and len(each) == _ROUNDS
        and all(len(one) == 1 for one in each)
        and len(set.union(*each)) > 1
    )


def _finding_of_workers(stream: _Stream) -> Finding | None:
    return finding(
        "same-rows",
        f"The {stream.workers} workers of the loader at {stream.place} give the same "
        f"batches: each row comes {stream.workers} times. Its data set has no numbers "
        "of rows, so each worker has all of it.",
        "Let `__iter__` of the data set give each worker a part: `info = "
        "torch.utils.data.get_worker_info()`, and `islice(rows, info.id, None, "
        "info.num_workers)`.",
        [stream.place],
    )


def _finding_of_rows(
    stream: _Stream, ranks: int, common: int, count: int
) -> Finding | None:
    return finding(
        "same-rows",
        f"Of the first {count} rows that each of {ranks} ranks gets from the loader at "
        f"{stream.place}, {common} are the same on all of them: the parts that its "
        "data set gives to ranks and workers overlap.",
        "Give each worker of each rank a part of its own, with the same step for all: "
        "`islice(rows, rank * workers + worker, None, ranks * workers)`.",
        [stream.place],
    )


def _finding(stream: _Stream, ranks: int) -> Finding | None:
    return finding(
        "same-rows",
        f"All {ranks} ranks train with the same batches of the loader at "
        f"{stream.place}: its data set has no numbers of rows, and no sampler divides "
        "it.",
        "Let `__iter__` of the data set give each rank a part: `islice(rows, rank, "
        "None, ranks)`.",
        [stream.place],
    )


def _tensors(batch: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The tensors of a batch, which may have lists and dictionaries.

    One of them may have itself.
    """
    if isinstance(batch, torch.Tensor):
        if can_be_read(batch) and batch.numel() > 1:
            yield batch
    elif isinstance(batch, dict) and depth:
        for value in batch.values():
            yield from _tensors(value, depth - 1)
    elif isinstance(batch, (list, tuple)) and depth:
        for value in batch:
            yield from _tensors(value, depth - 1)
