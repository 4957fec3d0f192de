"""Writes on pinned memory that torch does not see, while a copy is under way.

For example, NumPy makes such writes.

A copy that does not block has to find the memory as it was, and to be the last that
writes there, until the program waits for it. So the bytes are summed up when it begins,
and again when the program has waited.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import NamedTuple, final

import torch

from torchstrategy._base.memory import view_at
from torchstrategy.testing._simulation.listeners import Copy, Stream
from torchstrategy.testing._simulation.ordinals import is_simulated
from torchstrategy.testing._simulation.program import unwatched
from torchstrategy.testing._simulation.shapes import is_large, shapes_only


class UnderWay(NamedTuple):
    """A copy that the program has not waited for, and what its memory has to hold.

    This is its memory on the CPU.
    """

    storage: weakref.ref[torch.UntypedStorage]  # nobody can write once it is gone
    address: int
    # Dtype, offset, sizes and strides.
    where: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]
    checksum: int
    does: str  # `reads` or `writes`
    stream: Stream
    time: int
    line: str

    def is_changed(self) -> bool:
        """Whether its memory holds anything else now."""
        storage = self.storage()
        if storage is None:
            return False
        dtype, offset, sizes, strides = self.where
        with unwatched():
            tensor = torch.empty(0, dtype=dtype, device="cpu").set_(
                storage, offset, sizes, strides
            )
            return _checksum(tensor) != self.checksum


@final
class Checksums:
    """The copies that are under way."""

    def __init__(self) -> None:
        self._copies: list[UnderWay] = []

    def add(self, copy: Copy, stream: Stream, time: int, line: str) -> None:
        """A copy begins.

        A copy from a device is followed if its bytes are those of the device: it
        changes neither dtype nor layout.
        """
        source, target = copy.tensors
        if shapes_only() and is_large([target]):
            return
        here = target if is_simulated(source) else source
        if here is target and not _are_alike(source, target):
            return
        with unwatched():
            checksum = _checksum(source)
        storage = here.untyped_storage()
        where = (
            here.dtype,
            int(here.storage_offset()),
            tuple(here.shape),
            tuple(here.stride()),
        )
        does = "writes" if here is target else "reads"
        made = UnderWay(
            weakref.ref(storage),
            storage.data_ptr(),
            where,
            checksum,
            does,
            stream,
            time,
            line,
        )
        self._copies = [other for other in self._copies if other.storage() is not None]
        self._copies.append(made)

    def end(self, is_over: Callable[[UnderWay], bool]) -> list[UnderWay]:
        """Forgets the copies of which `is_over` says so.

        It returns the copies whose memory somebody has changed.
        """
        if not self._copies:
            return []
        ended = [copy for copy in self._copies if is_over(copy)]
        self._copies = [copy for copy in self._copies if copy not in ended]
        return [copy for copy in ended if copy.is_changed()]


def _are_alike(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (
        source.dtype == target.dtype
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
        and not (source.is_conj() or source.is_neg())
    )


def _checksum(tensor: torch.Tensor) -> int:
    """A checksum of the bytes of a tensor, also of a simulated device.

    The memory of such a tensor is that of the CPU.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if not tensor.numel():
        return 0
    return zlib.crc32(view_at(tensor.data_ptr(), tensor.nbytes))
