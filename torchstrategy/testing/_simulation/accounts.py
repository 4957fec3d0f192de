"""How many bytes each device holds.

It counts exactly the storages that were made on the device, in their present sizes.

`torch.cuda` says instead what CUDA's allocator would count, which gives out memory in
blocks and keeps it.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections import defaultdict
from typing import final

import torch

from torchstrategy.testing._simulation.ordinals import Spoken
from torchstrategy.testing._simulation.streams import freed, made

_BLOCK = 512  # bytes: the memory of a tensor of a GPU is a number of these
_SEGMENT = 2 * 2**20  # and a GPU gives it out by a number of these


def _in_blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


@final
class Account:
    """The bytes of one device: now, and at most since the last reset.

    Attributes:
        held: Those of the tensors, exactly.
        peak: The most of them.
        allocated: Those of the tensors in blocks, as CUDA's allocator counts them.
        allocated_peak: The most of them.
        reserved: Those that the allocator has: of the blocks, the most since
            `empty_cache`, in segments.
        reserved_peak: The most of them.
        taken: All that were ever allocated, in blocks.
        tensors: How many storages there are.
        ooms: How often there was not enough memory.
        limit: The most bytes in blocks, if the program has set one.
    """

    def __init__(self) -> None:
        self.held = self.peak = self.allocated = self.allocated_peak = self.reserved = (
            self.reserved_peak
        ) = 0
        self.taken = self.tensors = self.tensors_taken = self.ooms = 0
        self.limit: int | None = None

    def change(self, before: int, after: int) -> None:
        """Counts a storage of another size."""
        blocks, blocks_before = _in_blocks(after), _in_blocks(before)
        with _lock:
            self.held += after - before
            self.allocated += blocks - blocks_before
            self.tensors += (after > 0) - (before > 0)
            if after > before:
                self.peak = max(self.peak, self.held)
                self.allocated_peak = max(self.allocated_peak, self.allocated)
                self.taken += blocks - blocks_before
                self.tensors_taken += before == 0
                if self.allocated > self.reserved:
                    self._reserve()

    def _reserve(self) -> None:
        self.reserved = -(-self.allocated // _SEGMENT) * _SEGMENT
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def empty_cache(self) -> None:
        """Gives back what no tensor needs."""
        with _lock:
            self._reserve()

    def reset_peak(self) -> None:
        """Counts the peaks from here on."""
        with _lock:
            self.peak, self.allocated_peak, self.reserved_peak = (
                self.held,
                self.allocated,
                self.reserved,
            )


# Reentrant: the garbage collector may free a storage, and so change an account, while
# this thread holds the lock.
_lock = threading.RLock()
_accounts: defaultdict[int, Account] = defaultdict(Account)
# For each address, how many bytes less the storage has than it was made with.
_missing: dict[int, int] = {}


def account(storage: torch.UntypedStorage, index: int) -> None:
    """Counts a storage of the CPU for a simulated device, once.

    The memory of the storage becomes that of the device.
    """
    marks = storage.__dict__
    if "_torchstrategy_device" in marks:
        return
    marks["_torchstrategy_device"] = index
    size = storage.nbytes()
    found = _accounts[index]
    if found.limit is not None or size > _of_machine():
        most = _of_machine() if found.limit is None else found.limit
        if found.allocated + _in_blocks(size) > most:
            raise out_of_memory(index, size)
    found.change(0, size)
    weakref.finalize(
        storage, _give_back, index, size, storage.data_ptr()
    ).atexit = False
    try:
        made(index, storage.data_ptr())  # which raises if the device is full
    except torch.OutOfMemoryError:
        found.ooms += 1
        raise


def _give_back(index: int, size: int, address: int) -> None:
    with _lock:
        missing = _missing.pop(address, 0)
    _accounts[index].change(size - missing, 0)
    if missing < size or not size:
        freed(address)


def resized(index: int, address: int, whole: int, size: int) -> None:
    """Counts a storage in a new size.

    Args:
        index: Of its device.
        address: Of its memory.
        whole: The bytes with which it was made.
        size: The bytes that it has from here on, not more.
    """
    with _lock:
        before = whole - _missing.pop(address, 0)
        if size < whole:
            _missing[address] = whole - size
    _accounts[index].change(before, size)
    if before and not size:
        freed(address)
    elif size and not before:
        made(index, address)


def held(index: int) -> int:
    """The bytes that a device holds."""
    return _accounts[index].held


def peak(index: int) -> int:
    """The most bytes that a device held at a time since the last `reset_peak`."""
    return _accounts[index].peak


def account_of(index: int) -> Account:
    """All that is counted of a device."""
    return _accounts[index]


@functools.cache
def _of_machine() -> float:
    """The bytes of this machine's memory; infinite where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


# What torch says if the CPU has no memory left, on each system.
_OF_THE_CPU = ("DefaultCPUAllocator", "not enough memory")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the CPU, with the devices' memory, has no more."""
    return any(words in str(error) for words in _OF_THE_CPU)


def out_of_memory(index: int, size: int | None) -> torch.OutOfMemoryError:
    """Counts that there was not enough memory, and makes the error for it.

    The error is in torch's words for CUDA.

    Args:
        index: Of the device.
        size: How many bytes were wanted; None if it is not known.
    """
    found = _accounts[index]
    found.ooms += 1
    wanted = "" if size is None else f" Tried to allocate {_in_words(size)}."
    limit = "" if found.limit is None else f" {_in_words(found.limit)} allowed;"
    unused = _in_words(found.reserved - found.allocated)
    return torch.OutOfMemoryError(
        f"{Spoken.library()} out of memory.{wanted} GPU {index} is simulated in the "
        f"memory of this machine, {_in_words(_of_machine())}.{limit} Of the allocated "
        f"memory {_in_words(found.allocated)} is allocated by PyTorch, and {unused} is "
        "reserved by PyTorch but unallocated."
    )


def _in_words(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def reset_peak(index: int) -> None:
    """Counts the peak from here on."""
    _accounts[index].reset_peak()
