"""Kernels that make tensors, copy them, and make views of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from torchstrategy._base.torch_internals import has_one_tensor
from torchstrategy.testing._simulation.accounts import is_out_of_memory, out_of_memory
from torchstrategy.testing._simulation.backend import Backend, operator
from torchstrategy.testing._simulation.kernels import CPU, run_on_cpu
from torchstrategy.testing._simulation.memory import (
    Together,
    on_cpu,
    on_device,
    overlap,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    index_of,
    is_simulated,
    ordinal,
)
from torchstrategy.testing._simulation.pinned import is_pinned, pin
from torchstrategy.testing._simulation.shapes import is_large, shapes_only
from torchstrategy.testing._simulation.storages import (
    CPU_KERNELS,
    adopt,
    new_storage,
    point_at,
)
from torchstrategy.testing._simulation.streams import copied, guarded

# Operators that only note sizes, strides and a storage on a tensor.
_VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "is_set_to",
)


def register(backend: Backend) -> None:
    """Registers the kernels."""
    _register_factories(backend)
    _register_copies(backend)
    for name in _VIEWS:
        backend.redispatch(name, CPU_KERNELS)
    _register_storage_kernels(backend)
    _register_pinned_memory(backend)


def _register_factories(backend: Backend) -> None:
    @backend.kernel("empty.memory_format")
    def _empty(
        size: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        memory_format: Any = None,
        **_: Any,
    ) -> Any:
        layout = memory_format or torch.contiguous_format
        try:
            made = torch.empty(size, dtype=dtype, device=CPU, memory_format=layout)
        except RuntimeError as error:
            raise _explained(error, size, dtype, device) from None
        return on_device(made, ordinal(device))

    @backend.kernel("empty_strided")
    def _empty_strided(
        size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Any:
        try:
            made = torch.empty_strided(size, stride, dtype=dtype, device=CPU)
        except RuntimeError as error:
            raise _explained(error, size, dtype, device) from None
        return on_device(made, ordinal(device))

    # PyTorch has written these operators for real devices only.
    for name in ("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"):
        backend.kernel(name)(functools.partial(run_on_cpu, operator(name)))

    @backend.kernel("_efficientzerotensor")  # elsewhere a tensor without memory
    def _zeros(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return on_device(torch.zeros(size, dtype=dtype, device=CPU), ordinal(device))


def _explained(error: RuntimeError, size: Any, dtype: Any, device: Any) -> RuntimeError:
    if not is_out_of_memory(error):
        return error
    return out_of_memory(
        ordinal(device), math.prod(size) * (dtype or torch.get_default_dtype()).itemsize
    )


def _register_copies(backend: Backend) -> None:
    @backend.kernel("_copy_from")
    def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        see = (
            Together() if is_simulated(source) and overlap([source, target]) else on_cpu
        )
        copied(source, target, non_blocking)
        if shapes_only() and is_large([target]):
            return target
        (see(target) if is_simulated(target) else target).copy_(
            see(source) if is_simulated(source) else source
        )
        return target

    @backend.kernel("_copy_from_and_resize")
    def _copy_from_and_resize(source: Any, target: Any) -> Any:
        return _copy_from(source, target.resize_(source.shape))

    to_copy = operator("_to_copy")

    @backend.kernel("_to_copy")
    def _to_copy(tensor: Any, *, non_blocking: bool = False, **options: Any) -> Any:
        is_to_cpu = options.get("device") == CPU and tensor.layout is torch.strided
        if not (non_blocking and is_to_cpu):
            return to_copy.redispatch(
                CPU_KERNELS, tensor, non_blocking=non_blocking, **options
            )
        # For a copy to the CPU that does not block, torch allocates pinned memory,
        # which only C++ backends offer.
        layout = options.get("memory_format") or torch.preserve_format
        target = torch.empty_like(
            tensor, dtype=options.get("dtype"), device=CPU, memory_format=layout
        )
        return pin(target).copy_(tensor, non_blocking=True)

    foreach_copy = operator("_foreach_copy_")

    # This is the only operator on lists whose pairs may cross devices.
    @backend.kernel("_foreach_copy_")
    def _foreach_copy(targets: Any, sources: Any, non_blocking: bool = False) -> None:
        kinds = {
            (index_of(tensor), tensor.dtype, tensor.layout)
            for tensor in (*targets, *sources)
        }
        if len(kinds) == 1:
            # As with the other operators on lists, one kernel makes many copies.
            run_on_cpu(foreach_copy, targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking)

    # Torch resolves a conjugated tensor by a copy, which would come to this kernel
    # again, without end.
    backend.fall_through("_copy_from", "Conjugate")
    backend.fall_through("_copy_from", "Negative")

    # A stream here does its work at once, so nobody is waited for.
    @backend.kernel("record_stream")
    def _record_stream(tensor: Any, stream: Any) -> None:
        guarded(tensor, stream)


def _register_storage_kernels(backend: Backend) -> None:
    @backend.kernel("set_")
    def _empty_out(tensor: Any) -> Any:
        point_at(tensor, new_storage(0, ordinal(tensor.device)), 0, (0,), (1,))
        return tensor

    @backend.kernel("set_.source_Storage")
    def _set_storage(tensor: Any, storage: Any) -> Any:
        point_at(tensor, storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
        return tensor

    @backend.kernel("resize_")
    def _resize(tensor: Any, size: Any, *, memory_format: Any = None) -> Any:
        if list(tensor.size()) != list(size):
            _resized(tensor, list(size))
        if memory_format is not None:
            strides = torch.empty(
                size, device="meta", memory_format=memory_format
            ).stride()
            point_at(
                tensor, tensor.untyped_storage(), tensor.storage_offset(), size, strides
            )
        return tensor


def _resized(tensor: torch.Tensor, size: list[int]) -> None:
    offset, storage = tensor.storage_offset(), tensor.untyped_storage()
    needed = math.prod(size) + offset
    strides = [
        math.prod(max(1, n) for n in size[axis + 1 :]) for axis in range(len(size))
    ]
    if needed <= storage.nbytes() // tensor.element_size():
        point_at(tensor, storage, offset, size, strides)
        return
    if not has_one_tensor(storage):
        raise NotImplementedError(
            f"resize_ from {tuple(tensor.size())} to {tuple(size)} needs more memory "
            "than there is, and other tensors share that: views, or what `detach()` "
            f"gave. On '{NAME}' devices they would be left behind."
        )
    grown = torch.empty(needed, dtype=tensor.dtype, device=CPU)
    before = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    point_at(before, storage, 0, (storage.nbytes(),), (1,))
    grown.view(torch.uint8)[: before.numel()].copy_(on_cpu(before))
    adopt(tensor, grown.as_strided(size, strides, offset))


def _register_pinned_memory(backend: Backend) -> None:
    @backend.kernel("_pin_memory", "CPU")
    def _pin_memory(tensor: Any, device: Any = None) -> Any:
        return pin(tensor.clone())

    @backend.kernel("is_pinned", "CPU")
    def _is_pinned(tensor: Any, device: Any = None) -> bool:
        return is_pinned(tensor)
