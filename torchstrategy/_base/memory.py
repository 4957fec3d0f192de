"""Where the numbers of a tensor lie in memory: several at one place, or in memory that tensors share."""

from __future__ import annotations

from contextlib import nullcontext

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """The id of a tensor's memory; -1 if it has none, as a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


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
