"""What the names of `torch.cuda` stand for in a block of `cuda_alias`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchstrategy.testing._simulation import accounts as _accounts
from torchstrategy.testing._simulation.cuda_more import missing_names, more_names
from torchstrategy.testing._simulation.generators import default_generators
from torchstrategy.testing._simulation.module import (
    get_device_properties,
    manual_seed_all,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    current_device,
    known,
    ordinal,
)

# What `torch.sim` has under the same name.
_SAME = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
)


def names_of_cuda(translated: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    """The attributes to replace: the module, the name, and its value in the block.

    Args:
        translated: Makes, of what a program says for a device, what simulated devices
            are called.
    """
    served = set()
    for owner, name, value in _served(translated):
        if owner is torch.cuda:
            served.add(name)
        yield owner, name, value
    yield from missing_names(served)  # see Note [Names that are missing]


def _served(translated: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    module = torch.get_device_module(NAME)
    for name in _SAME:
        yield torch.cuda, name, _of_its_own(getattr(module, name))
    more = _more(translated)
    for name, function in more.items():
        yield torch.cuda, name, function
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, more[name]
    # Parts of the module are modules, and have the functions, too.
    for part, names in (
        (torch.cuda.memory, _OF_MEMORY),
        (torch.cuda.random, _OF_RANDOM),
    ):
        for name in names:
            yield part, name, _of_its_own(more.get(name) or getattr(module, name))
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield torch.cuda.nvtx, name, _marks_nothing
    for name, dtype in _LEGACY.items():
        yield torch.cuda, name, _legacy(name, dtype)
    yield from _of_groups()
    yield from more_names(translated)


def _of_groups() -> Iterator[tuple[Any, str, Any]]:
    """What `torch.distributed` says of groups.

    Its own code goes on to hear of simulated devices.
    """
    groups: Any = torch.distributed
    if groups.is_available():
        yield groups, "get_backend_config", _in_words_of_cuda(groups.get_backend_config)
        yield groups, "is_nccl_available", lambda: True


def _in_words_of_cuda(get_config: Callable[..., str]) -> Callable[..., str]:
    """Makes a replacement that says `cuda:nccl` to programs.

    This library's own strategies look for their devices.
    """

    @functools.wraps(get_config)
    def get(*args: Any, **kwargs: Any) -> str:
        config = get_config(*args, **kwargs)
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return (
            config
            if asks.startswith("torchstrategy.")
            else config.replace(f"{NAME}:", "cuda:")
        )

    return get


_OF_MEMORY = (
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_peak_memory_stats",
)
_OF_RANDOM = (
    "get_rng_state",
    "get_rng_state_all",
    "manual_seed",
    "manual_seed_all",
    "set_rng_state",
    "set_rng_state_all",
)
_LEGACY = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


# These look at the frame that calls them: a DTensor wants another state of random
# numbers than a program.
_ASK_WHO_CALLS = ("get_rng_state", "set_rng_state")


def dtype_of_legacy(kind: Any) -> torch.dtype | None:
    """The dtype of `torch.cuda.FloatTensor` or its like, or of its name.

    It is None if it is something else.
    """
    name = (
        kind if isinstance(kind, str) else f"torch.cuda.{getattr(kind, '__name__', '')}"
    )
    module, _, name = name.rpartition(".")
    return _LEGACY.get(name) if module == "torch.cuda" else None


def _of_its_own(thing: Any) -> Any:
    """An equal object: dynamo's tables refuse one function under two names."""
    if inspect.isclass(thing) or thing.__name__ in _ASK_WHO_CALLS:
        return thing

    @functools.wraps(thing)
    def same(*args: Any, **kwargs: Any) -> Any:
        return thing(*args, **kwargs)

    return same


_POOLS = ("all", "small_pool", "large_pool")


def statistics(index: int) -> dict[str, Any]:
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


def _more(translated: Callable[[Any], Any]) -> dict[str, Any]:
    """What `torch.cuda` has, and `torch.sim` has not."""

    def index(device: Any) -> int:
        return ordinal(translated(device))

    def can_device_access_peer(device: Any, peer_device: Any) -> bool:
        one, other = (
            known(value, index, what)
            for value, what in ((device, "device"), (peer_device, "peer device"))
        )
        return one != other

    def capability(device: Any = None) -> tuple[int, int]:
        properties = get_device_properties(known(device, index))
        return properties.major, properties.minor

    def seed_all() -> None:
        manual_seed_all(torch.seed())

    return {
        **_more_of_memory(index),
        "can_device_access_peer": can_device_access_peer,
        "comm": torch.nn.parallel.comm,
        "current_blas_handle": lambda: 0,
        "default_generators": tuple(default_generators()),
        "get_arch_list": list,
        "get_device_capability": capability,
        "initial_seed": lambda: default_generators()[current_device()].initial_seed(),
        "ipc_collect": _does_nothing,
        "list_gpu_processes": lambda device=None: (
            f"GPU:{index(device)}\nno processes are running"
        ),
        "seed": seed_all,
        "seed_all": seed_all,
        "utilization": lambda device=None: 0,
    }


def _more_of_memory(index: Callable[[Any], int]) -> dict[str, Any]:
    """The functions that tell how much memory is in use.

    Args:
        index: Returns the number of the device that a program means.
    """

    def of(device: Any) -> _accounts.Account:
        return _accounts.account_of(index(device))

    def stats(device: Any = None) -> OrderedDict[str, Any]:
        return OrderedDict(sorted(_flat(statistics(index(device)))))

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
        "get_per_process_memory_fraction": lambda device=None: fractions.get(
            index(device), 1.0
        ),
        "max_memory_cached": numbers["max_memory_reserved"],
        "mem_get_info": mem_get_info,
        "memory_cached": numbers["memory_reserved"],
        "memory_stats": stats,
        "memory_stats_as_nested_dict": lambda device=None: statistics(index(device)),
        "memory_summary": summary,
        "reset_accumulated_memory_stats": _does_nothing,
        "reset_max_memory_allocated": lambda device=None: _accounts.reset_peak(
            index(device)
        ),
        "reset_max_memory_cached": lambda device=None: _accounts.reset_peak(
            index(device)
        ),
        "set_per_process_memory_fraction": set_fraction,
    }


# torch's own, which asks for `memory_stats`.
_summary: Callable[..., str] = torch.cuda.memory.memory_summary


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """For functions that tell a driver what no simulated device has."""


def _marks_nothing(*args: Any, **kwargs: Any) -> int:
    """For marks in a profile that nobody takes."""
    return 0


def _legacy(name: str, dtype: torch.dtype) -> Any:
    """Makes a stand-in for `torch.cuda.FloatTensor` and its like.

    They are types and constructors at once.
    """

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return (
                isinstance(value, torch.Tensor)
                and value.device.type == NAME
                and value.dtype == dtype
            )

        def __call__(cls, *args: Any) -> torch.Tensor:
            if args and not isinstance(args[0], int):
                return torch.tensor(args[0], dtype=dtype, device=NAME)
            return torch.empty(*args or (0,), dtype=dtype, device=NAME)

    return Kind(name, (), {"__module__": "torch.cuda", "dtype": dtype})
