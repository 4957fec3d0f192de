"""The user's tensors, and whether they were written since the replicas' copies last agreed with them.

A run checks all tensors several times. So there is one list for the versions of all tensors, one for their addresses
and one for their layouts. Comparing two such lists needs no Python call for each tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, final

import torch

from torchstrategy._binding.uncounted_writes import UncountedWrites
from torchstrategy._core.torch_internals import keeping_version, marks_of, pointers, version, versions

_UNCOUNTED = -1  # takes the place of a version: the tensor was written without a change of its version


class TrackedTensor(NamedTuple):
    """A tensor of the user's, and its name."""

    name: str
    tensor: torch.Tensor
    is_running: bool = False  # a running statistic: torch's kernels write it without changing its version


@final
class TrackedTensors:
    """Some tensors of the user's.

    Args:
        held: The tensors that are part of a module.
        loose: The tensors that are not part of a module. They are not kept alive.
    """

    def __init__(self, held: Sequence[TrackedTensor], loose: Sequence[TrackedTensor] = ()) -> None:
        self.names = [original.name for original in (*held, *loose)]
        self.are_running = [original.is_running for original in (*held, *loose)]
        self._held = [original.tensor for original in held]
        self._loose = [weakref.ref(original.tensor) for original in loose]
        self._versions: list[int] = []
        self.pointers: list[int] = []  # the addresses of the tensors; another list when one has moved
        self._layouts: list[object] = []
        self._memory: list[object] = []  # keeps the memory, so that no other tensor can get one of the addresses
        self._watched: set[int] = set()
        self._uncounted = UncountedWrites({})
        self.take_changes()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors themselves."""
        if not self._loose:
            return self._held
        loose = [tensor for reference in self._loose if (tensor := reference()) is not None]
        assert len(loose) == len(self._loose), "copies are given up when a variable dies"
        return [*self._held, *loose]

    def watch(self, indices: Iterable[int]) -> None:
        """Starts to look for uncounted writes on some of the tensors: those of which replicas have real copies."""
        self._watched = set(indices)
        self._uncounted = UncountedWrites({index: self.tensors[index] for index in self._watched})

    def written(self) -> list[int]:
        """The indices of the tensors whose version or address has changed.

        It does not check whether a tensor has another shape or other strides over the same memory.
        """
        tensors = self.tensors
        now, known = (versions(tensors), pointers(tensors)), (self._versions, self.pointers)
        return [] if now == known else _differing(now, known)

    def take_changes(self) -> tuple[list[int], set[int]]:
        """The tensors that have changed since the copies agreed with them, and among these, the tensors that moved.

        A tensor has moved if its address, shape, strides or dtype has changed. The caller brings the copies up to date:
        later calls compare with the tensors as they are now.
        """
        tensors = self.tensors
        count, where, how = marks_of(tensors)
        has_moved = (where, how) != (self.pointers, self._layouts)
        moved = set(_differing((where, how), (self.pointers, self._layouts))) if has_moved else set()
        written = set(_differing((count,), (self._versions,))) if count != self._versions else set()
        self._versions = count
        if has_moved:
            self.pointers, self._layouts = where, how
            self._memory = [t.untyped_storage() if t.layout is torch.strided else None for t in tensors]
            # All watched tensors count as written: to look at the old memory of those that did not move is not worth
            # its risk.
            written |= moved | self._watched
            self.watch(self._watched)
        elif self._watched:
            written |= self._uncounted.take(written)
        return sorted(written), moved

    def note_agreement(self, indices: Iterable[int]) -> None:
        """Says that the copies agree with some of the tensors."""
        tensors = self.tensors
        for index in indices:
            self._versions[index] = version(tensors[index])

    def note_uncounted(self, indices: Iterable[int]) -> None:
        """Says that some of the tensors were written without a change of their version."""
        for index in indices:
            self._versions[index] = _UNCOUNTED

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Takes another tensor, one that is part of a module, in the place of one. The copies do not agree with it."""
        self._held[index] = tensor
        self.note_uncounted([index])

    def take(self, index: int, value: torch.Tensor) -> None:
        """Writes one of the tensors. After this, the copies do not agree with it."""
        write_value(self.tensors[index], value, self.are_running[index])
        self.note_uncounted([index])


def write_value(buffer: torch.Tensor, value: torch.Tensor, is_running: bool) -> None:
    """Writes a buffer, or a copy of one."""
    # torch's kernels write running statistics without changing their version, so that an earlier forward, which has
    # saved them for its backward, may still run this backward. The library does the same.
    if buffer.is_inference():
        with torch.inference_mode():
            buffer.copy_(value)
        return
    with keeping_version(buffer) if is_running else nullcontext():
        buffer.copy_(value.detach())


def _differing(columns: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> list[int]:
    rows, known = list(zip(*columns, strict=True)), list(zip(*others, strict=False))
    return [index for index, row in enumerate(rows) if index >= len(known) or row != known[index]]
