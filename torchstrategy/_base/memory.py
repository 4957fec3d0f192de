"""Where the numbers of a tensor lie in memory: several at one place, or in memory that tensors share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch


def memory_id(tensor: torch.Tensor) -> int:
    """The id of a tensor's memory; -1 if it has none, as a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end in its storage, in bytes."""
    size = tensor.element_size()
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start * size, start * size
    last = start + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (last + 1) * size


def memory_between_ends(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of the CPU from the first element of a tensor to its last, as bytes: the same memory, and no copy.

    In gaps between the elements there may be what belongs to other tensors.
    """
    start, stop = extent(tensor)
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    return memory.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def memory_at(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """So many bytes from an address of the CPU's memory: the same memory, which the caller has to keep alive.

    A run reads some kilobytes several times. By then, the code that makes an array of NumPy is in no cache of the
    processor: it takes 20 us there, and this takes 4.
    """
    return _reader_of(num_bytes)(address)


@functools.lru_cache(maxsize=64)
def _reader_of(num_bytes: int) -> Callable[[int], ctypes.Array[ctypes.c_char]]:
    return (ctypes.c_char * num_bytes).from_address


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as bytes, one after the other; a copy where they are not so in memory."""
    numbers = as_in_memory(tensor).contiguous()
    if not numbers.numel():  # an empty tensor, such as that of an empty array, may have strides that `view` refuses
        return numbers.new_empty(0, dtype=torch.uint8)
    return numbers.reshape(-1).view(torch.uint8)


def as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The real numbers of a tensor, each as it is in memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of some dense tensors of one dtype and device, one after the other, in new memory.

    So they are sent, added up or compared by one call. `torch_internals.unflatten` takes them apart again. (Torch's own
    function for this returns a view if there is one tensor only, on which the caller might write.)
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def write_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes on a tensor, which may be an expanded one: torch refuses to write on each of its numbers.

    Args:
        tensor: The tensor.
        values: Numbers of its shape. Where several of the tensor's numbers lie at one place, the first of these counts.
    """
    strides = tensor.stride() if tensor.layout is torch.strided and tensor.numel() else ()
    for dim, stride in enumerate(strides):
        if not stride:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        tensor.copy_(values)
