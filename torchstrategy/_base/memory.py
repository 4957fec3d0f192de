"""Where the numbers of a tensor lie in memory.

Several numbers may lie at one place, and tensors may share memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from torchstrategy._base.torch_internals import unseen_by_function_modes


# Note [Tensors without memory]
# To read at the address of a tensor that has no memory ends the process, and torch's
# own functions read there, too.
# - A tensor that wraps others, as `DTensor`, `FakeTensor` and torchao's quantized ones
#   do, has an empty storage.
# - Some programs take the memory of a tensor away while they do not use it, as FSDP
#   does by `storage.resize_(0)`.
# The address of either is not 0 if the tensor begins behind the beginning of its
# storage. A storage may also be too small, and `set_` would make it larger. So what
# reads memory asks here, and holds the storage while it reads: another thread may give
# the tensor other memory meanwhile. What a tensor wraps is to be had by `wrapped_by`.
def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage in which all elements of a dense tensor lie.

    It is None if there is no such storage, or if it is too small.

    See Note [Tensors without memory].
    """
    with unseen_by_function_modes():  # a subclass may give other answers
        try:
            storage = tensor.untyped_storage()
            is_there = storage.data_ptr() and extent(tensor)[1] <= storage.nbytes()
        # This layout has no storage, or the tensor wraps others.
        except RuntimeError:
            return None
    return storage if is_there else None


def has_lost_memory(tensor: torch.Tensor) -> bool:
    """Whether somebody has taken the memory of a dense tensor away.

    See Note [Tensors without memory].
    """
    with unseen_by_function_modes():
        try:
            # The elements of some quantized ones are parts of a byte.
            if not tensor.numel() or tensor.is_quantized:
                return False
            return extent(tensor)[1] > tensor.untyped_storage().nbytes()
        except RuntimeError:
            return False


LOST_MEMORY = (
    "{} has no memory: its storage is smaller than the tensor, as after "
    "tensor.untyped_storage().resize_(0). Its values are needed when the first run of "
    "a module begins. Give it memory and values before strategy.run, and take the "
    "memory away in the step, or later."
)


def sizes_of(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """How many bytes each of some storages has.

    The number changes if somebody takes memory away or adds some.
    """
    return list(map(torch.UntypedStorage.nbytes, storages))


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor has others in the place of memory of its own."""
    return hasattr(type(tensor), "__tensor_flatten__")


def wrapped_by(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor wraps in the place of memory of its own.

    It also lists what these wrap. A tensor that wraps none is its own only entry.
    """
    if not wraps_others(tensor):
        return [tensor]
    flatten_one: Any = tensor.__tensor_flatten__  # type: ignore[attr-defined]
    names, _ = flatten_one()
    return [part for name in names for part in wrapped_by(getattr(tensor, name))]


def memory_id(tensor: torch.Tensor) -> int:
    """The id of a tensor's memory; -1 if it has none, as a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end in its storage, in bytes."""
    size = tensor.element_size()
    start = int(tensor.storage_offset())
    if tensor.is_contiguous():  # as mostly; without elements, too
        return start * size, (start + tensor.numel()) * size
    last = start + sum(
        (length - 1) * stride
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start * size, (last + 1) * size


def memory_between_ends(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU's memory from a tensor's first element to its last, as bytes.

    The result is no copy: it shares the memory.

    In gaps between the elements there may be what belongs to other tensors. A tensor
    without memory has no bytes.
    """
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    storage = own_storage(tensor)
    if storage is None:
        return memory
    start, stop = extent(tensor)
    return memory.set_(storage, start, (stop - start,), (1,))


def memory_at(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """A number of bytes from an address of the CPU's memory.

    The result is no copy, so the caller has to keep the memory alive.

    A run reads some kilobytes several times. By then, the code that makes an array of
    NumPy is in no cache of the processor: it takes 20 us there, and this takes 4.
    """
    return _reader_of(num_bytes)(address)


def view_at(address: int, num_bytes: int) -> memoryview:
    """The same as `memory_at`, for callers that read many different numbers of bytes.

    ctypes makes a class for each length, of 9 kB, which stays until Python's collector
    of cycles comes. Here there is one for each power of two. It says more than there
    may be; nobody reads beyond the part that is returned.
    """
    return memoryview(_reader_of(1 << num_bytes.bit_length())(address))[:num_bytes]


@functools.lru_cache(maxsize=64)
def _reader_of(num_bytes: int) -> Callable[[int], ctypes.Array[ctypes.c_char]]:
    return (ctypes.c_char * num_bytes).from_address


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as bytes, one after the other.

    The result is a copy if the elements do not lie so in memory.
    """
    numbers = as_in_memory(tensor).contiguous()
    # An empty tensor, such as that of an empty array, may have strides that `view`
    # refuses.
    if not numbers.numel():
        return numbers.new_empty(0, dtype=torch.uint8)
    return numbers.reshape(-1).view(torch.uint8)


def as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The real numbers of a tensor, each as it is in memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_quantized:  # to view one as another dtype ends the process
        return tensor.int_repr()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of dense tensors of one dtype and device, in new memory.

    The tensors lie there one after the other.

    So they are sent, added up or compared by one call. `torch_internals.unflatten`
    takes them apart again. (Torch's own function for this returns a view if there is
    one tensor only, on which the caller might write.)
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def write_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes on a tensor, which may be an expanded one.

    PyTorch itself refuses to write on an expanded tensor.

    Args:
        tensor: The tensor.
        values: Numbers of its shape. Where several of the tensor's numbers lie at one
            place, the first of these counts.
    """
    strides = (
        tensor.stride() if tensor.layout is torch.strided and tensor.numel() else ()
    )
    for dim, stride in enumerate(strides):
        if not stride:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        tensor.copy_(values)
