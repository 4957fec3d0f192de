"""Tensors of the user's, and what they were when the replicas' copies last agreed with them.

A run looks at all of them several times. So they stand in columns, which are compared as lists, without a call of ours
for each tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, final

import torch

from torchstrategy._binding.uncounted_writes import UncountedWrites
from torchstrategy._core.torch_internals import keeping_version, layouts, pointers, version, versions

_UNCOUNTED = -1  # in the place of a version: it was written in a way that counts none


class TrackedTensor(NamedTuple):
    """A tensor of the user's, and what it is called."""

    name: str
    tensor: torch.Tensor
    is_running: bool = False  # a running statistic, which torch's kernels write without counting it


@final
class TrackedTensors:
    """Some tensors of the user's.

    Args:
        held: Those that are part of a module.
        loose: Those that are not: they live as long as the user has them.
    """

    def __init__(self, held: Sequence[TrackedTensor], loose: Sequence[TrackedTensor] = ()) -> None:
        self.names = [original.name for original in (*held, *loose)]
        self.are_running = [original.is_running for original in (*held, *loose)]
        self._held = [original.tensor for original in held]
        self._loose = [weakref.ref(original.tensor) for original in loose]
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._layouts: list[object] = []
        self._memory: list[object] = []  # kept, so that nothing else can come to lie there
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
        """From here on, looks for writes that torch does not count in some of them: those that have real copies."""
        self._watched = set(indices)
        self._uncounted = UncountedWrites({index: self.tensors[index] for index in self._watched})

    def written(self) -> list[int]:
        """Those that torch has counted as written, or that lie elsewhere.

        Whether they mean another part of the same memory is not asked.
        """
        tensors = self.tensors
        now, known = (versions(tensors), pointers(tensors)), (self._versions, self._pointers)
        return [] if now == known else _differing(now, known)

    def take_changes(self) -> tuple[list[int], set[int]]:
        """Those that changed since the copies agreed with them, as they do from here on; and those of them that moved.

        A tensor that moved lies elsewhere, or means another part of the same memory.
        """
        tensors = self.tensors
        count, where, how = versions(tensors), pointers(tensors), layouts(tensors)
        has_moved = (where, how) != (self._pointers, self._layouts)
        moved = set(_differing((where, how), (self._pointers, self._layouts))) if has_moved else set()
        written = set(_differing((count,), (self._versions,))) if count != self._versions else set()
        self._versions = count
        if has_moved:
            self._pointers, self._layouts = where, how
            self._memory = [t.untyped_storage() if t.layout is torch.strided else None for t in tensors]
            written |= moved | self._watched  # of what did not move, a look at the old memory is not worth its risk
            self.watch(self._watched)
        elif self._watched:
            written |= self._uncounted.take(written)
        return sorted(written), moved

    def are_counted(self, indices: Iterable[int]) -> None:
        """The copies agree with some of them."""
        tensors = self.tensors
        for index in indices:
            self._versions[index] = version(tensors[index])

    def are_uncounted(self, indices: Iterable[int]) -> None:
        """Some were written in a way that counts no version."""
        for index in indices:
            self._versions[index] = _UNCOUNTED

    def take(self, index: int, value: torch.Tensor) -> None:
        """Writes one; the copies do not agree with it any more."""
        write_value(self.tensors[index], value, self.are_running[index])
        self.are_uncounted([index])


def write_value(buffer: torch.Tensor, value: torch.Tensor, is_running: bool) -> None:
    """Writes a buffer, or a copy of one."""
    # torch's kernels do not count what they write on running statistics: an earlier forward of the module, which saved
    # them, may still run backward.
    if buffer.is_inference():
        with torch.inference_mode():
            buffer.copy_(value)
        return
    with keeping_version(buffer) if is_running else nullcontext():
        buffer.copy_(value.detach())


def _differing(columns: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> list[int]:
    rows, known = list(zip(*columns, strict=True)), list(zip(*others, strict=False))
    return [index for index, row in enumerate(rows) if index >= len(known) or row != known[index]]
