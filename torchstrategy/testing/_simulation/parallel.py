"""`torch.nn.parallel` on simulated devices: how it scatters, gathers and broadcasts.

torch does this in C++, which is compiled for CUDA only. Sizes, formats and streams
follow that C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrategy.testing._simulation.ordinals import NAME, ordinal
from torchstrategy.testing._simulation.streams import stream
from torchstrategy.testing._simulation.torch_internals import (
    BROADCAST,
    BROADCAST_COALESCED,
    BROADCAST_OUT,
    GATHER,
    GATHER_OUT,
    SCATTER,
    SCATTER_OUT,
)


def install() -> None:
    """Replaces the functions."""
    nccl: Any = torch.cuda.nccl
    nccl.is_available = _asked_for_cuda(nccl.is_available)
    for replaced, copy in (
        (SCATTER, _scattered),
        (SCATTER_OUT, _scattered_to),
        (GATHER, _gathered),
        (GATHER_OUT, _gathered_to),
        (BROADCAST, _broadcast),
        (BROADCAST_OUT, _broadcast_to),
        (BROADCAST_COALESCED, _broadcast_each),
    ):
        replaced.replace(_either(copy, replaced.now()))


def _asked_for_cuda(is_available: Callable[..., bool]) -> Callable[..., bool]:
    """Makes a replacement for `torch.cuda.nccl.is_available`.

    The replacement says no if no tensor is on CUDA.

    A torch without NCCL would warn at each call.
    """

    @functools.wraps(is_available)
    def answer(tensors: Sequence[torch.Tensor]) -> bool:
        return any(tensor.is_cuda for tensor in tensors) and is_available(tensors)

    return answer


def _either(
    copy: Callable[..., Any], real: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Makes a function that calls `real` for tensors of CUDA, and `copy` for others.

    It calls `real` only if torch has it.
    """

    @functools.wraps(copy)
    def chosen(tensors: Any, *args: Any) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        is_cuda = any(tensor.is_cuda for tensor in given)
        return (
            real(tensors, *args)
            if is_cuda and real is not None
            else copy(tensors, *args)
        )

    return chosen


def _scattered(
    tensor: torch.Tensor,
    devices: Sequence[int],
    sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[torch.Tensor, ...]:
    parts = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    made = []
    for i, (part, index) in enumerate(zip(parts, devices, strict=False)):
        with stream(streams[i] if streams else None):
            # The copy has the strides of the part, or is the part itself.
            made.append(part.to(_device(index), non_blocking=True))
    return tuple(made)


def _scattered_to(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int = 0, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    if not out:
        raise ValueError(
            "comm.scatter(out=[]) has nowhere to write: give it one tensor for each "
            "part."
        )
    dim = dim % tensor.dim()
    for i, one in enumerate(out):
        _check_device(one, f"scatter(out=...), part {i},")
        _check_size(one, tensor, dim, f"scatter(out=...), part {i},")
    sizes = [one.size(dim) for one in out]
    if sum(sizes) != tensor.size(dim):
        raise ValueError(
            f"comm.scatter(out=...): the tensors of `out` have {sum(sizes)} rows along "
            f"dimension {dim}, and the tensor has {tensor.size(dim)}. Give them sizes "
            "that add up to that."
        )
    for i, (one, part) in enumerate(zip(out, tensor.split(sizes, dim), strict=True)):
        with stream(streams[i] if streams else None):
            one.copy_(part, non_blocking=True)
    return tuple(out)


def _gathered(
    tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    first = tensors[0]
    dim = dim % max(1, first.dim())
    size = list(first.size())
    size[dim] = sum(tensor.size(dim) for tensor in tensors)
    device = (
        torch.device(NAME, ordinal(None))
        if destination is None
        else _device(destination)
    )
    is_channels_last = all(_is_channels_last(tensor) for tensor in tensors)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    return _gathered_to(
        tensors,
        torch.empty(size, dtype=first.dtype, device=device, memory_format=layout),
        dim,
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    # A tensor of one channel has both formats. torch's C++ then takes it for a plain
    # one.
    formats = torch.channels_last, torch.contiguous_format
    return tensor.dim() == 4 and [
        tensor.is_contiguous(memory_format=one) for one in formats
    ] == [True, False]


def _gathered_to(
    tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int
) -> torch.Tensor:
    dim = dim % max(1, out.dim())
    for i, tensor in enumerate(tensors):
        _check_size(tensor, out, dim, f"gather(...), tensor {i},")
    sizes = [tensor.size(dim) for tensor in tensors]
    if sum(sizes) != out.size(dim):
        raise ValueError(
            f"comm.gather(out=...): the tensors have {sum(sizes)} rows along dimension "
            f"{dim}, and `out` has {out.size(dim)}. Give it a tensor of that size."
        )
    for part, tensor in zip(out.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=out.device.type == NAME)
    return out


# The dtypes that NCCL sends, as torch's C++ translates them. A broadcast among
# different devices goes by NCCL.
_SENT = frozenset(
    {
        torch.bfloat16,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)


def _check_dtype(tensor: torch.Tensor, devices: Sequence[int]) -> None:
    is_by_nccl = (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.device.type == NAME
    )
    if (
        is_by_nccl
        and tensor.dtype not in _SENT
        and any(index != tensor.get_device() for index in devices)
    ):
        raise RuntimeError(
            f"Unconvertible NCCL type {str(tensor.dtype).removeprefix('torch.')}"
        )


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    _check_dtype(tensor, devices)
    return [tensor.to(_device(index), non_blocking=True) for index in devices]


def _broadcast_to(
    tensor: torch.Tensor, out: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    for i, one in enumerate(out):
        _check_device(one, f"broadcast(out=...), tensor {i},")
        if one.size() != tensor.size():
            raise ValueError(
                f"comm.broadcast(out=...), tensor {i}, has the size "
                f"{tuple(one.size())}, and the tensor that is broadcast has "
                f"{tuple(tensor.size())}. Give it a tensor of that size."
            )
    _check_dtype(tensor, [one.get_device() for one in out])
    for one in out:
        one.copy_(tensor, non_blocking=True)
    return list(out)


def _broadcast_each(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    for tensor in tensors:
        _check_dtype(tensor, devices)
    return [
        [tensor.to(_device(index), non_blocking=True) for tensor in tensors]
        for index in devices
    ]


def _check_device(tensor: torch.Tensor, what: str) -> None:
    if tensor.device.type != NAME:
        raise ValueError(
            f"comm.{what} is on {tensor.device}: it has to be on one of the {NAME!r} "
            "devices."
        )


def _check_size(tensor: torch.Tensor, whole: torch.Tensor, dim: int, what: str) -> None:
    expected = [*whole.size()[:dim], "any", *whole.size()[dim + 1 :]]
    given: list[Any] = [*tensor.size()[:dim], "any", *tensor.size()[dim + 1 :]]
    if tensor.dim() != whole.dim() or given != expected:
        raise ValueError(
            f"comm.{what} has the size {tuple(tensor.size())}: except along dimension "
            f"{dim}, it has to be that of the whole, {tuple(whole.size())}."
        )


def _device(index: int) -> torch.device:
    return torch.device(NAME, index) if index >= 0 else torch.device("cpu")
