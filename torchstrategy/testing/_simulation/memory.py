"""One piece of CPU memory, as a tensor of a simulated device and as one of the CPU.

DLPack passes memory from one library to another, in a capsule that also names the
device of the memory. In a capsule that says "CPU", this file writes "device i of a kind
that torch does not know", which torch takes for its PrivateUse1 device; and the
reverse. Both tensors are plain ones over the same bytes and keep them alive. Nothing is
copied.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch

from torchstrategy._base.torch_internals import sparse_indices, sparse_values
from torchstrategy.testing._simulation.accounts import account
from torchstrategy.testing._simulation.torch_internals import (
    conjugate_view,
    from_dlpack,
    make_sparse,
    negative_view,
    to_dlpack,
)

# A capsule points at a struct that begins with { void* data; struct { int32 type; int32
# id; } device; ... }.
_DEVICE_OFFSET = 8
_CPU, _EXTENSION = 1, 12  # DLPack's numbers for kinds of devices
_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]

# Torch's DLPack does not know these dtypes. Tensors of them are passed as bytes.
_AS_BYTES = frozenset(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The memory of a tensor on the CPU, as a tensor on a simulated device."""
    if tensor.layout is torch.sparse_coo:
        return _sparse(
            tensor,
            on_device(sparse_indices(tensor), index),
            on_device(sparse_values(tensor), index),
        )
    account(tensor.untyped_storage(), index)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in _AS_BYTES:
        return _retagged(tensor.view(torch.uint8), _EXTENSION, index).view(tensor.dtype)
    return _retagged(tensor, _EXTENSION, index)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on a simulated device, as a tensor on the CPU.

    The tensor has the same sizes and strides.
    """
    if tensor.layout is torch.sparse_coo:
        return _sparse(
            tensor, on_cpu(sparse_indices(tensor)), on_cpu(sparse_values(tensor))
        )
    if tensor.dtype in _AS_BYTES:
        return _retagged(tensor.view(torch.uint8), _CPU, 0).view(tensor.dtype)
    return _marked_like(tensor, _retagged(tensor, _CPU, 0))


def on_cpu_to_write(tensor: torch.Tensor) -> torch.Tensor:
    """`on_cpu` for an operator that writes on the tensor."""
    # The operator may have to resize a tensor without elements, so it gets memory of
    # its own.
    if tensor.layout is torch.strided and not tensor.numel():
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
    return on_cpu(tensor)


def _marked_like(tensor: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj():
        here = conjugate_view(here)
    return negative_view(here) if tensor.is_neg() else here


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of one of some tensors may reach into that of another."""
    filled = [
        tensor
        for tensor in tensors
        if tensor.layout is torch.strided and tensor.numel()
    ]
    return any(
        start < end for (_, end), (start, _) in pairwise(sorted(map(span, filled)))
    )


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first element of a tensor, and of the end of the last."""
    steps = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


@final
class Together:
    """`on_cpu_to_write` for several tensors.

    Those that share a storage share one on the CPU, too.

    So torch notices if an operator would write memory that it also reads, and refuses.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.numel():
            return on_cpu_to_write(tensor)
        here = torch.empty(0, dtype=tensor.dtype, device="cpu")
        here.set_(
            self._storage(tensor),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        return _marked_like(tensor, here)

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        if place not in self._storages:
            whole = tensor.as_strided(
                (storage.nbytes() // tensor.element_size(),), (1,), 0
            )
            self._storages[place] = on_cpu(whole).untyped_storage()
        return self._storages[place]


def _retagged(tensor: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    capsule = to_dlpack(tensor)
    # Both integers at once, in a little-endian machine's order.
    pair = (index << 32) | kind
    ctypes.c_int64.from_address(
        _pointer_in(capsule, b"dltensor") + _DEVICE_OFFSET
    ).value = pair
    return from_dlpack(capsule)


def check_byte_order() -> None:
    """Refuses a machine on which `_retagged` would swap the two integers.

    On such a machine, it would write them in the wrong order.

    Raises:
        RuntimeError: On a big-endian machine.
    """
    if sys.byteorder != "little":
        raise RuntimeError("Devices can be simulated on little-endian machines only.")


def _sparse(
    like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    return make_sparse(  # type: ignore[no-any-return]
        like.sparse_dim(),
        like.dense_dim(),
        like.size(),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=like.is_coalesced(),
    )
