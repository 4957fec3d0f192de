"""Lets code that says `"cuda"` run on simulated devices."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from torchstrategy._core.torch_internals import function_modes
from torchstrategy.testing._simulation.ordinals import NAME, current_device, device_count, ordinal
from torchstrategy.testing._simulation.torch_internals import tensor_cuda

# The functions of `torch.cuda` that are replaced for the length of a block.
_FUNCTIONS = (
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
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
)

# Functions that take the name of a device type, and that no `TorchFunctionMode` sees.
_TOLD_A_NAME = ((torch.autocast, "__init__"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"))

_lock = threading.Lock()
_before: list[tuple[Any, str, Any]] = []  # while a block is open: what is replaced, to be put back
_open = 0  # how many blocks are open, on all threads


@final
class cuda_alias(TorchFunctionMode):
    """A block in which `"cuda"` means the simulated devices: for code that names CUDA and is to be tested without.

    `device="cuda:1"`, `.to("cuda")`, `.cuda(1)`, `torch.cuda.set_device(1)`, `torch.autocast("cuda")` and their like act
    on `sim:1`, and checkpoints name `cuda:1`. Tensors go on reporting `sim`, and `tensor.is_cuda` stays False: code that
    asks them that sees the difference. It holds for the thread that entered it and for the replicas that it runs;
    `torch.cuda`'s functions and `torch.autocast` are exchanged for all.

    Raises:
        RuntimeError: On entering, if no devices are simulated.

    Example:
        >>> with torchstrategy.testing.cuda_alias():
        ...     pass
        Traceback (most recent call last):
        RuntimeError: cuda_alias() gives "cuda" the meaning of simulated devices, and there are none: call torchstrategy.testing.simulate_devices(n) first.
    """  # noqa: E501

    def __enter__(self) -> cuda_alias:
        if not device_count():
            raise RuntimeError(
                'cuda_alias() gives "cuda" the meaning of simulated devices, and there are none: call '
                "torchstrategy.testing.simulate_devices(n) first."
            )
        with _lock:
            _open_one()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with _lock:
            _close_one()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (tensor_cuda, torch.Tensor.cuda):
            return _cuda(*args, **kwargs)
        # `torch.device("cuda")` has no index: it means the device that is current when it is used.
        if func is torch.device and args[:1] == ("cuda",):
            return torch.device(NAME, *args[1:], **kwargs)
        return func(*map(_translated, args), **{name: _translated(value) for name, value in kwargs.items()})


def _open_one() -> None:
    global _open
    if not _before:
        module = torch.get_device_module(NAME)
        for name in _FUNCTIONS:
            _exchange(torch.cuda, name, getattr(module, name))
        for owner, name in _TOLD_A_NAME:
            _exchange(owner, name, _told(getattr(owner, name)))
    _open += 1


def _exchange(owner: Any, name: str, value: Any) -> None:
    _before.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _close_one() -> None:
    global _open
    _open -= 1
    while _before and not _open:
        setattr(*_before.pop())


def _told(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for a function, in which `"cuda"`, or no argument at all, means simulated devices."""

    @functools.wraps(call)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not _is_on():
            return call(*args, **kwargs)
        if not args and not kwargs:
            return call(NAME)
        named = {name: NAME if value == "cuda" else value for name, value in kwargs.items()}
        return call(*(NAME if value == "cuda" else value for value in args), **named)

    return told


def _is_on() -> bool:
    return any(isinstance(mode, cuda_alias) for mode in function_modes())


def install() -> None:
    """Lets `torch.save` and `torch.load` say "cuda" for simulated devices in such blocks."""
    torch.serialization.register_package(_BEFORE_CUDA, _tag, _restore)


_BEFORE_CUDA = 5  # torch's own package for CUDA is asked at 20


def _tag(storage: Any) -> str | None:
    return f"cuda:{storage.device.index}" if storage.device.type == NAME and _is_on() else None


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("cuda") or not _is_on():
        return None
    return storage.to(device=torch.device(NAME, ordinal(_translated(location))))


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
    return tensor.to(torch.device(NAME, ordinal(_translated(device))), non_blocking=non_blocking, **options)


def _translated(value: Any) -> Any:
    if type(value) is str and value.partition(":")[0] == "cuda":
        value = torch.device(value)
    if type(value) is torch.device and value.type == "cuda":
        return torch.device(NAME, current_device() if value.index is None else value.index)
    return value
