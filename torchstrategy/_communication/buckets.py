"""Many small tensors sent as a few large ones: the buckets.

The tensors are flattened, put one after the other and cut into buckets; after the transfer they are taken apart again.
A *column* has the tensors of one shape that the replicas have of one value, a tensor for each replica. Columns of one
dtype and on the same devices share buckets; a sparse or empty tensor is sent as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, final

import torch

Column = Sequence[torch.Tensor]


class _Piece(NamedTuple):
    """A part of a flattened column."""

    column: int
    start: int
    stop: int


@final
class Bucketing:
    """Which part of which column is in which bucket.

    Args:
        columns: The columns that are sent.
        packs: The parts of columns that each bucket has. Every element of every column is in one of them, in order.
    """

    def __init__(self, columns: Sequence[Column], packs: Sequence[Sequence[_Piece]]) -> None:
        self._columns = columns
        self._packs = packs

    @classmethod
    def by_number(cls, columns: Sequence[Column], count: int) -> Bucketing:
        """`count` buckets of equal size for each kind of column; the last one also has the rest. 0: one per column."""
        packs: list[list[_Piece]] = []
        for kind in _kinds(columns):
            is_cut = count and _is_packable(columns[kind[0]])
            packs += _cut(columns, kind, count) if is_cut else _filled(columns, kind, 0)
        return cls(columns, packs)

    @classmethod
    def by_size(cls, columns: Sequence[Column], limit: int) -> Bucketing:
        """Buckets of whole columns, of `limit` bytes at most; a larger column has its own. 0: one for each column."""
        return cls(columns, [pack for kind in _kinds(columns) for pack in _filled(columns, kind, limit)])

    def packed(self) -> list[list[torch.Tensor]]:
        """For each bucket, a tensor for each replica. A column that has a bucket of its own is not copied."""
        return [
            [self._joined(pieces, replica) for replica in range(len(self._columns[pieces[0].column]))]
            for pieces in self._packs
        ]

    def unpacked(self, packs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for each column, made of a tensor for each bucket. No two of them share memory."""
        whole: dict[int, torch.Tensor] = {}
        parts: dict[int, list[torch.Tensor]] = {}
        for pieces, pack in zip(self._packs, packs, strict=True):
            if self._is_whole(pieces):
                whole[pieces[0].column] = pack
                continue
            for piece, part in zip(pieces, pack.split([p.stop - p.start for p in pieces]), strict=True):
                parts.setdefault(piece.column, []).append(part)
        return [
            whole[index] if index in whole else torch.cat(parts[index]).view(column[0].shape)
            for index, column in enumerate(self._columns)
        ]

    def _joined(self, pieces: Sequence[_Piece], replica: int) -> torch.Tensor:
        if self._is_whole(pieces):
            return self._columns[pieces[0].column][replica]
        parts = [self._columns[p.column][replica].reshape(-1)[p.start : p.stop] for p in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _is_whole(self, pieces: Sequence[_Piece]) -> bool:
        """Whether a bucket is exactly one column."""
        return len(pieces) == 1 and pieces[0] == _whole(self._columns, pieces[0].column)


def in_buckets(
    columns: Sequence[Column], limit: int, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> list[torch.Tensor]:
    """Calls `combine`, which works element by element, on columns in buckets, and returns its result for each column.

    A bucket has `limit` bytes at most; 0: `combine` is called on each column by itself.
    """
    if not limit:
        return [combine(column) for column in columns]
    packing = Bucketing.by_size(columns, limit)
    return packing.unpacked([combine(pack) for pack in packing.packed()])


def _kinds(columns: Sequence[Column]) -> list[list[int]]:
    """The columns that can share buckets, by position."""
    kinds: dict[Hashable, list[int]] = {}
    for index, column in enumerate(columns):
        key = (column[0].dtype, tuple(t.device for t in column)) if _is_packable(column) else index
        kinds.setdefault(key, []).append(index)
    return list(kinds.values())


def _is_packable(column: Column) -> bool:
    return all(tensor.layout is torch.strided for tensor in column) and column[0].numel() > 0


def _whole(columns: Sequence[Column], index: int) -> _Piece:
    return _Piece(index, 0, columns[index][0].numel())


def _filled(columns: Sequence[Column], kind: Sequence[int], limit: int) -> list[list[_Piece]]:
    packs: list[list[_Piece]] = []
    room = -1
    for index in kind:
        size = columns[index][0].numel() * columns[index][0].element_size()
        if room < size:
            packs.append([])
            room = limit
        packs[-1].append(_whole(columns, index))
        room -= size
    return packs


def _cut(columns: Sequence[Column], kind: Sequence[int], count: int) -> list[list[_Piece]]:
    sizes = [columns[index][0].numel() for index in kind]
    size = sum(sizes) // count  # of a bucket; if there are fewer elements than buckets, they are one bucket
    ends = [*(size * k for k in range(1, count) if size), sum(sizes)]
    packs: list[list[_Piece]] = [[] for _ in ends]
    done = pack = 0
    for index, numel in zip(kind, sizes, strict=True):
        start = 0
        while start < numel:
            stop = min(numel, ends[pack] - done)
            packs[pack].append(_Piece(index, start, stop))
            pack += stop == ends[pack] - done
            start = stop
        done += numel
    return packs
