"""How many bytes each device holds: exactly those of the storages that were made on it, in their present sizes."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import final

import torch

from torchstrategy.testing._simulation.streams import freed, made


@final
class _Account:
    """The bytes of one device: now, and at most since the last reset."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    def add(self, size: int) -> None:
        with _lock:
            self.held += size
            self.peak = max(self.peak, self.held)


# Reentrant: the garbage collector may free a storage, and so change an account, while this thread holds the lock.
_lock = threading.RLock()
_accounts: defaultdict[int, _Account] = defaultdict(_Account)
_missing: dict[int, int] = {}  # by address: how many bytes less a storage has than it was made with


def account(storage: torch.UntypedStorage, index: int) -> None:
    """Counts a storage of the CPU, whose memory becomes that of a simulated device, for that device; once."""
    marks = storage.__dict__
    if "_torchstrategy_device" in marks:
        return
    marks["_torchstrategy_device"] = index
    size = storage.nbytes()
    _accounts[index].add(size)
    weakref.finalize(storage, _give_back, index, size, storage.data_ptr()).atexit = False
    made(index, storage.data_ptr())  # which raises if the device is full


def _give_back(index: int, size: int, address: int) -> None:
    with _lock:
        missing = _missing.pop(address, 0)
    _accounts[index].add(missing - size)
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
    _accounts[index].add(size - before)
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


def reset_peak(index: int) -> None:
    """Counts the peak from here on."""
    _accounts[index].peak = _accounts[index].held
