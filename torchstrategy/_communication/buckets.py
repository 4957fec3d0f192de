"""Many small tensors sent as a few large ones: the buckets.

The tensors are flattened, put one after the other and cut into buckets; after the transfer they are taken apart again.
A *column* has the tensors of one shape that the replicas have of one value, a tensor for each replica. Columns of one
dtype and on the same devices share buckets; a sparse or empty tensor is sent as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple, final

import torch

Column = Sequence[torch.Tensor]


class _Group(NamedTuple):
    """Columns, by position, that are flattened and put one after the other, and the sizes of the buckets of them."""

    columns: list[int]
    sizes: list[int]

    @property
    def is_one_tensor(self) -> bool:
        """Whether the only bucket is exactly one column."""
        return len(self.columns) == len(self.sizes) == 1


@final
class Bucketing:
    """Which columns are in which buckets.

    Args:
        columns: The columns that are sent.
        limit: How many bytes are put one after the other at most; a larger column is alone.
        count: How many buckets of equal size these are cut into; the last one also has the rest.
    """

    def __init__(self, columns: Sequence[Column], limit: float, count: int) -> None:
        self._columns = columns
        kinds = [_kind(column) or index for index, column in enumerate(columns)]
        together = grouped(kinds, [column[0].numel() * column[0].element_size() for column in columns], limit)
        self._groups = [_Group(indices, self._sizes(indices, count)) for indices in together]

    @classmethod
    def by_number(cls, columns: Sequence[Column], count: int) -> Bucketing:
        """`count` buckets of equal size for each kind of column; the last one also has the rest. 0: one per column."""
        return cls(columns, math.inf, count) if count else cls.by_size(columns, 0)

    @classmethod
    def by_size(cls, columns: Sequence[Column], limit: int) -> Bucketing:
        """Buckets of whole columns, of `limit` bytes at most; a larger column has its own. 0: one for each column."""
        return cls(columns, limit, 1)

    def packed(self) -> list[list[torch.Tensor]]:
        """For each bucket, a tensor for each replica. A column that has a bucket of its own is not copied."""
        packs: list[list[torch.Tensor]] = []
        for group in self._groups:
            by_replica = zip(*(self._columns[index] for index in group.columns), strict=True)
            packs += map(list, zip(*(_cut(tensors, group) for tensors in by_replica), strict=True))
        return packs

    def unpacked(self, packs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for each column, made of a tensor for each bucket. No two of them share memory."""
        found: dict[int, torch.Tensor] = {}
        rest = iter(packs)
        for group in self._groups:
            arrived = list(islice(rest, len(group.sizes)))
            ends = accumulate(self._columns[index][0].numel() for index in group.columns)
            for index, end in zip(group.columns, ends, strict=True):
                shape = self._columns[index][0].shape
                found[index] = arrived[0] if group.is_one_tensor else _part(arrived, end, shape)
        return [found[index] for index in range(len(self._columns))]

    def _sizes(self, indices: Sequence[int], count: int) -> list[int]:
        """The sizes of the buckets of columns that are put one after the other: one if they are too small to cut."""
        total = sum(self._columns[index][0].numel() for index in indices)
        size = total // count if _kind(self._columns[indices[0]]) else 0
        return [*[size] * (count - 1), total - size * (count - 1)] if size else [total]


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


def grouped(kinds: Iterable[Hashable], sizes: Iterable[int], limit: float) -> list[list[int]]:
    """Which of several things go together, by position: those of one kind, up to a total size."""
    groups: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, float] = {}
    for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if room.get(kind, -1) < size:
            groups.append([])
            filling[kind], room[kind] = groups[-1], limit
        filling[kind].append(index)
        room[kind] -= size
    return groups


def _kind(column: Column) -> Hashable:
    """What columns that share buckets have in common; None for a column that is sent as it is."""
    if not column[0].numel() or any(tensor.layout is not torch.strided for tensor in column):
        return None
    return column[0].dtype, tuple(tensor.device for tensor in column)


def _cut(tensors: Sequence[torch.Tensor], group: _Group) -> Sequence[torch.Tensor]:
    """The buckets of one replica."""
    if group.is_one_tensor:
        return tensors
    return list(torch.cat([tensor.reshape(-1) for tensor in tensors]).split_with_sizes(group.sizes))


def _part(packs: Sequence[torch.Tensor], end: int, shape: torch.Size) -> torch.Tensor:
    """A copy of the last elements before `end`, of flat tensors that are put one after the other, in a shape."""
    start = end - shape.numel()
    ends = list(accumulate(map(len, packs)))
    around = [(pack, done - len(pack)) for pack, done in zip(packs, ends, strict=True) if done > start]
    return torch.cat([pack[max(start - begun, 0) : end - begun] for pack, begun in around if begun < end]).view(shape)
