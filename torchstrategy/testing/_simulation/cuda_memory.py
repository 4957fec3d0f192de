"""What `torch.cuda` tells of memory in a block of `cuda_alias`.

Its figures are those of `accounts`. Its pools and settings change nothing.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchstrategy.testing._simulation import accounts as _accounts
from torchstrategy.testing._simulation.cuda_graphs import graph_pool_handle
from torchstrategy.testing._simulation.module import get_device_properties
from torchstrategy.testing._simulation.ordinals import device_count


def functions_of_memory(index: Callable[[Any], int]) -> dict[str, Any]:
    """The functions of `torch.cuda` that tell how much memory is in use.

    Args:
        index: Returns the number of the device that a program means.
    """

    def of(device: Any) -> _accounts.Account:
        return _accounts.account_of(index(device))

    def stats(device: Any = None) -> OrderedDict[str, Any]:
        return OrderedDict(sorted(_flat(_statistics(index(device)))))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = get_device_properties(index(device)).total_memory
        return max(total - of(device).reserved, 0), total

    def summary(device: Any = None, abbreviated: bool = False) -> str:
        return _summary(index(device), abbreviated)

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        fractions[index(device)] = fraction
        # The size that `mem_get_info` says is that of no GPU, and limits nobody who
        # does not ask for a part of it.
        total = get_device_properties(index(device)).total_memory
        of(device).limit = None if fraction == 1 else int(fraction * total)

    fractions: dict[int, float] = {}
    numbers = {
        "memory_allocated": lambda device=None: of(device).allocated,
        "max_memory_allocated": lambda device=None: of(device).allocated_peak,
        "memory_reserved": lambda device=None: of(device).reserved,
        "max_memory_reserved": lambda device=None: of(device).reserved_peak,
    }
    for name, function in numbers.items():
        function.__name__ = name
    return {
        **numbers,
        "MemPool": MemPool,
        "caching_allocator_disabled": _nothing_happens,
        "caching_allocator_enable": _does_nothing,
        "device_memory_used": lambda device=None: _accounts.held(index(device)),
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: fractions.get(
            index(device), 1.0
        ),
        "max_memory_cached": numbers["max_memory_reserved"],
        "mem_get_info": mem_get_info,
        "memory_cached": numbers["memory_reserved"],
        "memory_snapshot": lambda *args, **kwargs: _snapshot()["segments"],
        "memory_stats": stats,
        "memory_stats_as_nested_dict": lambda device=None: _statistics(index(device)),
        "memory_summary": summary,
        "memory_usage": lambda device=None: 0,
        "reset_accumulated_host_memory_stats": _does_nothing,
        "reset_accumulated_memory_stats": _does_nothing,
        "reset_max_memory_allocated": lambda device=None: _accounts.reset_peak(
            index(device)
        ),
        "reset_max_memory_cached": lambda device=None: _accounts.reset_peak(
            index(device)
        ),
        "reset_peak_host_memory_stats": _does_nothing,
        "set_per_process_memory_fraction": set_fraction,
        "use_mem_pool": _nothing_happens,
    }


# torch's own, which asks for `memory_stats`.
_summary: Callable[..., str] = torch.cuda.memory.memory_summary


def private_functions_of_memory() -> dict[str, Any]:
    """The functions of `torch.cuda.memory` with private names that many call."""
    return {
        "_record_memory_history": _does_nothing,
        "_snapshot": lambda device=None, augment_with_fx_traces=False: _snapshot(),
        "_dump_snapshot": _dump_snapshot,
        "_set_allocator_settings": _does_nothing,
    }


_POOLS = ("all", "small_pool", "large_pool")


def _statistics(index: int) -> dict[str, Any]:
    """What `torch.cuda.memory_stats_as_nested_dict` counts of a device.

    It is zero where nothing is known.

    All memory counts as that of the pool of large tensors.
    """
    account = _accounts.account_of(index)
    blocks = account.allocated, account.allocated_peak, account.taken
    tensors = account.tensors, account.tensors, account.tensors_taken
    counted = {
        "active": tensors,
        "active_bytes": blocks,
        "allocated_bytes": blocks,
        "allocation": tensors,
        "inactive_split": (0, 0, 0),
        "inactive_split_bytes": (0, 0, 0),
        "requested_bytes": (account.held, account.peak, account.taken),
        "reserved_bytes": (
            account.reserved,
            account.reserved_peak,
            account.reserved_peak,
        ),
        "segment": (0, 0, 0),
    }
    stats: dict[str, Any] = {
        name: {
            pool: _counts(*(0, 0, 0) if pool == "small_pool" else numbers)
            for pool in _POOLS
        }
        for name, numbers in counted.items()
    }
    stats.update(
        {
            name: _counts(0, 0, 0)
            for name in ("oversize_allocations", "oversize_segments")
        }
    )
    for name in (
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_sync_all_streams",
    ):
        stats[name] = 0
    return {**stats, "max_split_size": -1, "num_ooms": account.ooms}


def _counts(current: int, peak: int, taken: int) -> dict[str, int]:
    return {
        "current": current,
        "peak": max(peak, current),
        "allocated": taken,
        "freed": max(taken - current, 0),
    }


def _flat(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class MemPool:
    """Stands in for `torch.cuda.MemPool`.

    It is a name for memory, which comes from where all comes from.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.id = graph_pool_handle()
        self.allocator = None

    def use_count(self) -> int:
        """How many hold it."""
        return 1

    def snapshot(self, *args: Any, **options: Any) -> list[Any]:
        """What is in it: nothing is told apart."""
        return []


def _snapshot() -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot` says: what devices hold, and no history."""
    segments = [
        {
            "device": device,
            "address": 0,
            "total_size": _accounts.account_of(device).reserved,
            "allocated_size": _accounts.account_of(device).allocated,
            "active_size": _accounts.account_of(device).allocated,
            "requested_size": _accounts.held(device),
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "stream": 0,
            "is_expandable": False,
            "frames": [],
            "blocks": [],
        }
        for device in range(device_count())
    ]
    traces: list[list[Any]] = [[] for _ in segments]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(
    filename: str = "dump_snapshot.pickle", *args: Any, **options: Any
) -> None:
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """For functions that tell an allocator what no simulated device has."""


@contextmanager
def _nothing_happens(*args: Any, **kwargs: Any) -> Iterator[None]:
    """For blocks that tell an allocator what no simulated device has."""
    yield
