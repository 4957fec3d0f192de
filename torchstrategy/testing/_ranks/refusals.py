"""What a backend refuses of one rank's tensors, before it exchanges anything.

The errors are torch's own, in its words.

A group of ranks would take most of it, since it copies tensors of the CPU. A program
that passed here would then fail on a cluster. The errors are those that torch 2.11
raised on an H100, but for those of a rank's messages to itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from torchstrategy.testing._ranks.tensors import name_of
from torchstrategy.testing._ranks.torch_internals import OBJECTS_OF
from torchstrategy.testing._simulation.dtypes import name_in_cpp
from torchstrategy.testing._simulation.ordinals import NAME

_NCCL, _GLOO = "nccl", "gloo"
# Those for which NCCL has a type. Complex numbers are sent as pairs of real ones.
_DTYPES_OF_NCCL = frozenset(
    getattr(torch, name)
    for name in (
        *(
            "int8",
            "uint8",
            "int32",
            "int64",
            "bool",
            "float16",
            "bfloat16",
            "float32",
            "float64",
        ),
        *("complex32", "complex64", "complex128"),
        *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"),
    )
)
_NOT_REDUCED_BY_NCCL = ("band", "bor", "bxor")


def check_backend(
    backends: Mapping[str, str],
    kind: str,
    tensors: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] = (),
    operation: Any = None,
    is_coalesced: bool = False,
) -> None:
    """Refuses what the backend does not take.

    Args:
        backends: The backend for each type of device. Empty: there is no accelerator,
            and any name is served.
        kind: Which collective.
        tensors: The tensors that the backend looks at.
        others: More tensors of the collective, which may be anywhere.
        operation: How it reduces, if it does.
        is_coalesced: Whether the backend takes tensors together, and then in any order
            of memory.

    Raises:
        RuntimeError: If there is no backend for their device, or NCCL is to reduce
            sparse tensors.
        ValueError: If NCCL does not take tensors of their layout, or does not know the
            reduction.
        TypeError: If NCCL does not know their dtype.
    """
    if not backends or not tensors:
        return
    types = [tensor.device.type for tensor in (*tensors, *others)]
    # torch chooses the backend of an accelerator first.
    chosen = next((one for one in types if one != "cpu"), "cpu")
    if chosen not in backends:
        if chosen == "cpu" and _is_called_by("object"):
            return  # they are not moved to the device here, as torch does
        shown = "cuda" if chosen == NAME else chosen
        raise RuntimeError(f"No backend type associated with device type {shown}")
    if backends[chosen] != _NCCL:
        return
    for tensor in tensors:
        _check_layout(kind, tensor, is_coalesced)
    _check_dtype(tensors[0].dtype, operation)


def _check_layout(kind: str, tensor: torch.Tensor, is_coalesced: bool) -> None:
    if tensor.is_sparse and kind == "all_reduce":
        raise RuntimeError(
            "NCCL does not support all_reduce with sparse tensors. Please use dense "
            "tensors instead."
        )
    if tensor.is_sparse or tensor.device.type == "cpu":
        raise ValueError("Tensors must be CUDA and dense")
    if not is_coalesced and not _is_contiguous(tensor):
        raise ValueError("Tensors must be contiguous")


def _is_contiguous(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return last is not None and tensor.is_contiguous(memory_format=last)


def _check_dtype(dtype: torch.dtype, operation: Any) -> None:
    if dtype not in _DTYPES_OF_NCCL:
        raise TypeError(
            "Input tensor data type is not supported for NCCL process group: "
            f"{name_in_cpp(dtype)}"
        )
    reduction = "" if operation is None else name_of(operation)
    if reduction == "avg" and dtype is torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if reduction in _NOT_REDUCED_BY_NCCL:
        raise ValueError(f"Cannot use ReduceOp.{reduction.upper()} with NCCL")


def _is_called_by(part_of_name: str) -> bool:
    """Whether a function of `torch.distributed` called the collective.

    For example, `all_gather_object` calls collectives.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_globals.get("__name__") == OBJECTS_OF
            and part_of_name in frame.f_code.co_name
        ):
            return True
        frame = frame.f_back
    return False


def check_own_message(what: str, backend: str) -> None:
    """Refuses a message of a rank to itself.

    gloo has no connection for it, and NCCL takes its two ends only together.

    Args:
        what: Who does what, for the error.
        backend: What is to exchange it.

    Raises:
        RuntimeError: If the backend does not take it.
    """
    if backend in (_GLOO, "undefined"):
        raise RuntimeError(
            f"{what}, and gloo has no connection of a rank to itself. Copy the tensor."
        )
    if backend == _NCCL and not _is_called_by("batch_isend_irecv"):
        raise RuntimeError(
            f"{what}, and NCCL takes both ends of such a message only together. Copy "
            "the tensor, or give `batch_isend_irecv` the `isend` and the `irecv`."
        )


def check_gathered(output: torch.Tensor, given: torch.Tensor, count: int) -> None:
    """Refuses an output of `all_gather_into_tensor` without room for all ranks' input.

    Raises:
        TypeError: If its dtype is another one.
        ValueError: If its size is another one.
    """
    if output.dtype != given.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if output.numel() != given.numel() * count:
        raise ValueError(
            "output tensor size must be equal to world_size times input tensor size"
        )


def check_scattered(output: torch.Tensor, given: torch.Tensor, count: int) -> None:
    """Refuses an input of `reduce_scatter_tensor` that cannot be divided into outputs.

    Raises:
        TypeError: If its dtype is another one.
        ValueError: If its size is another one.
    """
    if output.dtype != given.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if given.numel() != output.numel() * count:
        raise ValueError(
            "input tensor must be the same size as output size times world size"
        )


def check_split(tensor: torch.Tensor, rows: Sequence[int], count: int) -> None:
    """Refuses a tensor of `all_to_all_single` with rows that do not divide equally.

    Raises:
        RuntimeError: If they cannot.
    """
    if not len(rows):
        if tensor.dim() and tensor.size(0) % count:
            raise RuntimeError(
                "Tensor's dim 0 does not divide equally across group size"
            )
    elif len(rows) != count:
        raise RuntimeError("Number of tensor splits not equal to group size")
    elif sum(map(int, rows)) != tensor.size(0):
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
