"""What NCCL would do with tensors of simulated devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.cuda import nccl

from torchstrategy._base import torch_internals
from torchstrategy._group import transfer

_ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ADDED += (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


def let_nccl_join_simulated_devices(patch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Lets the library send between simulated devices as it does between CUDA devices.

    Returns a list that gets the dtype of each sum.
    """
    dtypes: list[torch.dtype] = []

    def total(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = inputs[0].dtype
        if dtype not in _ADDED:
            raise RuntimeError(f"Unconvertible NCCL type {dtype}")
        assert all(
            tensor.is_contiguous() and tensor.dtype is dtype for tensor in inputs
        )
        assert len({tensor.device for tensor in inputs}) == len(inputs)
        dtypes.append(dtype)
        on_cpu = [tensor.detach().cpu() for tensor in inputs]
        if dtype is torch.bool:  # its bytes
            on_cpu = [tensor.reshape(-1).view(torch.uint8) for tensor in on_cpu]
        first, *others = on_cpu
        result = first.clone()
        for other in others:
            result += other
        return (
            result.view(dtype).view(inputs[0].shape) if dtype is torch.bool else result
        )

    def write(output: torch.Tensor, result: torch.Tensor) -> None:
        if output.dtype is torch.bool:  # torch itself would make each byte 0 or 1
            output, result = output.view(torch.uint8), result.view(torch.uint8)
        output.copy_(result)

    def all_reduce(
        inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        result = total(inputs)
        for output in outputs:
            write(output, result)

    def reduce(inputs: Sequence[torch.Tensor], output: torch.Tensor, root: int) -> None:
        assert output.device == inputs[root].device
        write(output, total(inputs))

    def is_available(tensors: Sequence[torch.Tensor]) -> bool:
        are_different = len({tensor.device for tensor in tensors}) == len(tensors)
        return are_different and all(
            t.layout is torch.strided and t.is_contiguous() for t in tensors
        )

    patch.setattr(transfer, "_KNOWN", frozenset({"cuda", "sim"}))
    patch.setattr(torch_internals, "HAS_NCCL", True)
    for stand_in in (all_reduce, reduce, is_available):
        patch.setattr(nccl, stand_in.__name__, stand_in)
    return dtypes
