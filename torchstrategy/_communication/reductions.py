"""The arithmetic of `Strategy.reduce` and `Strategy.gather`, which make one value of per-replica values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchstrategy._communication.operands import as_tensor, check_addable, check_gatherable
from torchstrategy._communication.transfer import added, concatenated
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import Device, Tree


def combined_along(op: ReduceOp, values: Sequence[Tree], axis: int | tuple[int, ...], device: Device) -> torch.Tensor:
    """The sum or mean, on `device`, of values whose sizes along `axis` may differ.

    Each value is summed along the axis, and then the sums are added. The mean divides by the total size along the axis:
    it is the mean over all rows.

    Raises:
        ValueError: If there is no such axis, or the sums differ in shape.
        TypeError: If `axis` is neither an integer nor a tuple of them.
    """
    sums = [summed_along(value, axis) for value in values]
    check_addable(sums)
    total = added(sums, device)
    if op is ReduceOp.SUM:
        return total
    return total / torch.tensor(sum(size_along(value, axis) for value in values), device=total.device)


def summed_along(value: Tree, axis: int | tuple[int, ...]) -> torch.Tensor:
    """The sum of one value along one axis or several axes.

    Raises:
        ValueError: If there is no such axis.
        TypeError: If `axis` is neither an integer nor a tuple of them.
    """
    tensor, axes = as_tensor(value), axis if isinstance(axis, tuple) else (axis,)
    if not all(isinstance(a, int) for a in axes):
        raise TypeError(f"The axis to reduce along is an integer or a tuple of them; got {axis!r}.")
    for a in axes:
        if not -tensor.dim() <= a < tensor.dim():
            raise ValueError(f"There is no axis {a} to reduce along: a value has the shape {tuple(tensor.shape)}.")
    if len({a % tensor.dim() for a in axes}) < len(axes):
        raise ValueError(f"axis={axis!r} names a dimension twice: a value has the shape {tuple(tensor.shape)}.")
    return tensor.sum(dim=axes, dtype=None if tensor.dtype == torch.bool else tensor.dtype)


def size_along(value: Tree, axis: int | tuple[int, ...]) -> int:
    """How many rows were added for each element of `summed_along`."""
    shape = as_tensor(value).shape
    return math.prod(shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))


def gathered(values: Sequence[Tree], axis: int, device: Device) -> torch.Tensor:
    """The values, concatenated along `axis`, on `device`.

    Raises:
        ValueError: If they are scalars, there is no such axis, or they differ elsewhere than along it.
    """
    tensors = [as_tensor(value) for value in values]
    check_gatherable(tensors, axis)
    return concatenated(tensors, axis, device)
