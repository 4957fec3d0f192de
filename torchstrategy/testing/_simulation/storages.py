"""Storages of simulated devices: how they are made, resized and exchanged.

It also sends storages to another process.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torchstrategy._base.torch_internals import make_parameter
from torchstrategy.testing._simulation.accounts import resized
from torchstrategy.testing._simulation.memory import on_cpu, on_device
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    device_count,
    is_simulated,
    ordinal,
)
from torchstrategy.testing._simulation.torch_internals import (
    DispatchKey,
    DispatchKeySet,
)

# Some kernels of the CPU only note sizes, strides and a storage on a tensor. They work
# for tensors of any device.
CPU_KERNELS = DispatchKeySet(DispatchKey.CPU)

_set_storage: Any = torch.ops.aten.set_.source_Storage_storage_offset
_LOGICAL_SIZE = "_torchstrategy_size"
_SENT = "_torchstrategy_sent"


class Starting:
    """Processes that are started with tensors of simulated devices as arguments.

    Attributes:
        refused: What to say instead, with `{device}` for the tensor's; None: the
            process gets copies.
    """

    refused: str | None = None


def point_at(
    tensor: torch.Tensor, storage: Any, offset: Any, size: Any, stride: Any
) -> None:
    """Makes a tensor a view of a storage."""
    _set_storage.redispatch(CPU_KERNELS, tensor, storage, offset, size, stride)


def new_storage(size: int, index: int) -> torch.UntypedStorage:
    """A storage of `size` bytes on a simulated device."""
    return on_device(
        torch.empty(size, dtype=torch.uint8, device="cpu"), index
    ).untyped_storage()


def adopt(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Makes a device's tensor the same as the one that the CPU made instead."""
    if made.size() == tensor.size() and not made.numel():
        return
    own = tensor.untyped_storage()
    behind = made.data_ptr() - own.data_ptr()
    # The memory is the same, and only sizes and strides have changed.
    if made.numel() and 0 <= behind < own.nbytes():
        point_at(
            tensor, own, behind // tensor.element_size(), made.size(), made.stride()
        )
        return
    if (
        made.is_contiguous()
        and tensor.storage_offset() * tensor.element_size() + made.nbytes
        <= own.nbytes()
    ):
        point_at(tensor, own, tensor.storage_offset(), made.size(), made.stride())
        on_cpu(tensor).copy_(made)
        return
    index = ordinal(tensor.device)
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    whole.set_(made.untyped_storage(), 0, (made.untyped_storage().nbytes(),), (1,))
    point_at(
        tensor,
        on_device(whole, index).untyped_storage(),
        made.storage_offset(),
        made.size(),
        made.stride(),
    )


def install() -> None:
    """Teaches `torch.UntypedStorage` about simulated devices.

    It teaches queues between processes, too.
    """
    storage: Any = torch.UntypedStorage
    storage.__new__ = staticmethod(_maker(storage.__new__))
    storage.resize_ = _resizer(storage.resize_, storage.nbytes)
    storage.nbytes = storage.size = _size_reader(storage.nbytes)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduced)


def _maker(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `torch.UntypedStorage(10, device="sim:1")`.

    Copying and loading call it.

    Torch's C++ has no allocator for simulated devices.
    """

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if (
            device is not None
            and torch.device(device).type == NAME
            and isinstance(args[0] if args else 0, int)
        ):
            return new_storage(args[0] if args else 0, ordinal(device))
        if device is not None:
            kwargs["device"] = device
        return make(cls, *args, **kwargs)

    return new


def _resizer(
    resize: Callable[..., Any], nbytes: Callable[..., int]
) -> Callable[..., Any]:
    """Makes a replacement for `storage.resize_`.

    FSDP uses `resize_` to free memory and to take it again.

    The memory stays, and only the size is noted, here and in the account of the device.
    """

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != NAME:
            return resize(self, size)
        if size > nbytes(self):
            raise RuntimeError(
                f"A storage on {self.device} cannot grow from the {nbytes(self)} bytes "
                f"that it was made with to {size}."
            )
        resized(self.device.index, self.data_ptr(), nbytes(self), size)
        self.__dict__[_LOGICAL_SIZE] = size
        return self

    return resize_


def _size_reader(nbytes: Callable[..., int]) -> Callable[..., int]:
    def read(self: Any) -> int:
        size: int | None = self.__dict__.get(_LOGICAL_SIZE)
        return nbytes(self) if size is None else size

    return read


def _reduced(tensor: torch.Tensor) -> Any:
    if not is_simulated(tensor):
        return reductions.reduce_tensor(tensor)
    # The process that is being started, if the tensor is an argument of it.
    starting = get_spawning_popen()
    if starting is not None and Starting.refused is not None:
        raise RuntimeError(Starting.refused.format(device=tensor.device))
    copy = tensor.detach().cpu()
    if starting is not None:
        # The process inherits the file that this memory is in. It must not be closed
        # before: the next tensor's file would have its number.
        starting.__dict__.setdefault(_SENT, []).append(copy)
    return _rebuilt, (type(tensor), copy, tensor.device.index, tensor.requires_grad)


def _rebuilt(
    kind: type[torch.Tensor], tensor: torch.Tensor, index: int, requires_grad: bool
) -> torch.Tensor:
    if index >= device_count():
        raise RuntimeError(
            f"This process was sent a tensor on {NAME}:{index} and simulates "
            f"{device_count()} devices. Call "
            f"torchstrategy.testing.simulate_devices({index + 1}), or more, in it as "
            "well."
        )
    here = tensor.to(torch.device(NAME, index))
    return (
        make_parameter(kind, here, requires_grad)
        if kind is torch.nn.Parameter
        else here.requires_grad_(requires_grad)
    )
