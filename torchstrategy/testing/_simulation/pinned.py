"""Pinned memory, which here is memory of the CPU with a mark.

`pin_memory=True` asks for it where memory is made, as in `torch.empty(4,
pin_memory=True)`. torch's C++ asks a backend for an allocator then, and only a backend
in C++ has one. So kernels in Python make the memory. With them, each tensor that the
CPU makes costs three microseconds more: they are only there once somebody asks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel

from torchstrategy.testing._simulation.torch_internals import make_on_cpu

_MARK = "_torchstrategy_pinned"
_registered: list[Library] = []


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the CPU is in pinned memory."""
    return _MARK in tensor.untyped_storage().__dict__


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Makes the memory of a tensor of the CPU pinned memory, and returns the tensor."""
    tensor.untyped_storage().__dict__[_MARK] = True
    return tensor


def allow_pinned_creation() -> None:
    """Registers the kernels of `pin_memory=True`, for the rest of the process."""
    if _registered:
        return
    library = Library("aten", "IMPL")
    _registered.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it has such kernels
        library.impl("empty.memory_format", _empty, "CPU")
        library.impl("empty_strided", _empty_strided, "CPU")


def _empty(
    size: Sequence[int], *, memory_format: Any = None, **options: Any
) -> torch.Tensor:
    if memory_format in (None, torch.contiguous_format):
        strides = [1] * len(size)
        for axis in reversed(range(len(size) - 1)):
            strides[axis] = strides[axis + 1] * max(1, size[axis + 1])
    else:
        strides = list(
            torch.empty(size, device="meta", memory_format=memory_format).stride()
        )
    return _empty_strided(size, strides, **options)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: Any = None,
    pin_memory: bool | None = None,
    **_: Any,
) -> torch.Tensor:
    made = make_on_cpu(tuple(size), tuple(stride), dtype or torch.get_default_dtype())
    return pin(made) if pin_memory else made


def install() -> None:
    """Allows `pin_memory=True` in torch's own code, which no function mode sees."""
    ddp: Any = DistributedDataParallel
    make_ddp, make_saving = ddp.__init__, save_on_cpu.__init__

    @functools.wraps(make_ddp)
    def init_ddp(model: Any, *args: Any, **kwargs: Any) -> None:
        make_ddp(model, *args, **kwargs)
        # The map of used parameters is copied to the device.
        if model.find_unused_parameters or model.static_graph:
            allow_pinned_creation()

    @functools.wraps(make_saving)
    def init_saving(
        block: Any, pin_memory: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if pin_memory:
            allow_pinned_creation()
        make_saving(block, pin_memory, *args, **kwargs)

    saving: Any = save_on_cpu
    ddp.__init__, saving.__init__ = init_ddp, init_saving
