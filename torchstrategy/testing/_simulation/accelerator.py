"""`torch.accelerator`, backward and `torch.nn.parallel` on simulated devices.

These ask torch's C++ about devices. A device guard that is written in Python can only say that there is one device, the
first. So the functions that ask the guard are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from torchstrategy.testing._simulation import module as _module
from torchstrategy.testing._simulation import ordinals as _ordinals
from torchstrategy.testing._simulation import streams as _streams
from torchstrategy.testing._simulation.ordinals import NAME
from torchstrategy.testing._simulation.pending import raise_what_was_taken
from torchstrategy.testing._simulation.torch_internals import BROADCAST, BROADCAST_COALESCED, ENGINE, GATHER, SCATTER


def install() -> None:
    """Replaces the functions."""
    accelerator: Any = torch.accelerator
    accelerator.device_count = _ordinals.device_count
    accelerator.current_device_index = accelerator.current_device_idx = _ordinals.current_device
    accelerator.set_device_index = accelerator.set_device_idx = _ordinals.set_device
    accelerator.device_index = _ordinals.current
    accelerator.synchronize = _module.synchronize
    accelerator.current_stream = _streams.current_stream
    accelerator.set_stream = _streams.set_stream
    accelerator.memory_allocated = _module.memory_allocated
    accelerator.max_memory_allocated = _module.max_memory_allocated
    accelerator.reset_peak_memory_stats = _module.reset_peak_memory_stats
    setattr(*ENGINE, _Engine(getattr(*ENGINE)))
    nccl: Any = torch.cuda.nccl
    nccl.is_available = _asked_for_cuda(nccl.is_available)
    for place, copy in (
        (SCATTER, _scattered),
        (GATHER, _gathered),
        (BROADCAST, _broadcast),
        (BROADCAST_COALESCED, _broadcast_each),
    ):
        setattr(*place, _either(copy, getattr(*place, None)))


@final
class _Engine:
    """Runs backward on the calling thread, since torch's pool of threads has none for a second device."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            try:
                return self._engine.run_backward(*args, **kwargs)
            # Python raises this error for a C function that failed and left no exception; see `pending`.
            except SystemError:
                raise_what_was_taken()
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _asked_for_cuda(is_available: Callable[..., bool]) -> Callable[..., bool]:
    """Makes a replacement for `torch.cuda.nccl.is_available`, which says no if no tensor is on CUDA.

    A torch without NCCL would warn at each call.
    """

    @functools.wraps(is_available)
    def answer(tensors: Sequence[torch.Tensor]) -> bool:
        return any(tensor.is_cuda for tensor in tensors) and is_available(tensors)

    return answer


def _either(copy: Callable[..., Any], real: Callable[..., Any] | None) -> Callable[..., Any]:
    """Makes a function that calls `real` for tensors of CUDA, if torch has it, and `copy` for all others."""

    @functools.wraps(copy)
    def chosen(tensors: Any, *args: Any) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        is_cuda = any(tensor.is_cuda for tensor in given)
        return real(tensors, *args) if is_cuda and real is not None else copy(tensors, *args)

    return chosen


def _scattered(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Any = None, dim: int = 0, streams: Any = None
) -> Any:
    parts = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    return tuple(part.contiguous().to(_device(index)) for part, index in zip(parts, devices, strict=False))


def _gathered(tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None) -> torch.Tensor:
    device = tensors[0].device if destination is None else _device(destination)
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.to(_device(index)) for index in devices]


def _broadcast_each(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    return [[tensor.to(_device(index)) for tensor in tensors] for index in devices]


def _device(index: int) -> torch.device:
    return torch.device(NAME, index) if index >= 0 else torch.device("cpu")
