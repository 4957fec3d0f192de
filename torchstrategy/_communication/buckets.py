"""Many tensors sent as few: flattened, put one after the other, cut into packs, and taken apart again.

A *column* is what each replica has of one value: tensors of one shape. Columns of one dtype and on the same devices
share packs; what is sparse or empty goes as it is.
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
    """Which part of which column is in which pack.

    Args:
        columns: What is packed.
        packs: The pieces of each pack. Every element of every column is in one of them, in order.
    """

    def __init__(self, columns: Sequence[Column], packs: Sequence[Sequence[_Piece]]) -> None:
        self._columns = columns
        self._packs = packs

    @classmethod
    def by_number(cls, columns: Sequence[Column], count: int) -> Bucketing:
        """Equal packs, `count` for each kind of column, the last with the rest. 0: every column by itself."""
        packs: list[list[_Piece]] = []
        for kind in _kinds(columns):
            packs += _cut(columns, kind, count) if count and _is_packable(columns[kind[0]]) else _alone(columns, kind)
        return cls(columns, packs)

    @classmethod
    def by_size(cls, columns: Sequence[Column], limit: int) -> Bucketing:
        """Packs of whole columns, of `limit` bytes at most; a larger column by itself. 0: every column by itself."""
        return cls(columns, [pack for kind in _kinds(columns) for pack in _filled(columns, kind, limit)])

    def packed(self) -> list[list[torch.Tensor]]:
        """For each pack what each replica has of it. What is alone in a pack is not copied."""
        return [
            [self._joined(pieces, replica) for replica in range(len(self._columns[pieces[0].column]))]
            for pieces in self._packs
        ]

    def unpacked(self, packs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for each column, out of one for each pack. No two share memory."""
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
        """Whether a pack is one column, as it is."""
        return len(pieces) == 1 and pieces[0] == _whole(self._columns, pieces[0].column)


def in_buckets(
    columns: Sequence[Column], limit: int, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> list[torch.Tensor]:
    """What `combine` makes of each column, element by element; in packs of `limit` bytes at most, or 0: one by one."""
    if not limit:
        return [combine(column) for column in columns]
    packing = Bucketing.by_size(columns, limit)
    return packing.unpacked([combine(pack) for pack in packing.packed()])


def _kinds(columns: Sequence[Column]) -> list[list[int]]:
    """The columns that can share packs, by position."""
    kinds: dict[Hashable, list[int]] = {}
    for index, column in enumerate(columns):
        key = (column[0].dtype, tuple(t.device for t in column)) if _is_packable(column) else index
        kinds.setdefault(key, []).append(index)
    return list(kinds.values())


def _is_packable(column: Column) -> bool:
    return all(tensor.layout is torch.strided for tensor in column) and column[0].numel() > 0


def _whole(columns: Sequence[Column], index: int) -> _Piece:
    return _Piece(index, 0, columns[index][0].numel())


def _alone(columns: Sequence[Column], kind: Sequence[int]) -> list[list[_Piece]]:
    return [[_whole(columns, index)] for index in kind]


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
    size = sum(sizes) // count  # of a pack; fewer elements than packs are one pack
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
