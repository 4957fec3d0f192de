"""Which values can be added up or put together, and what does not fit."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from torchstrategy._core.protocols import VariableBase
from torchstrategy._core.types import Tree


def as_tensor(value: Tree) -> torch.Tensor:
    """A leaf of a reduction as a tensor; numbers and arrays are converted.

    Raises:
        TypeError: If it has no numbers.
        ValueError: If it is None.
    """
    if isinstance(value, torch.Tensor):
        return value.read_value() if isinstance(value, VariableBase) else value
    if value is None:
        raise ValueError("Only tensors, arrays and numbers can be combined across replicas; got None.")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"Only tensors, arrays and numbers can be combined across replicas; got {value!r}.") from None


def check_addable(tensors: Sequence[torch.Tensor]) -> None:
    """Raises an error for tensors that could be added only with broadcasting or a conversion.

    Raises:
        ValueError: If their shapes or dtypes differ.
    """
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"The replicas' values cannot be added: {_described(tensors)}. They must be of one shape and dtype; "
                "with `axis=0`, Strategy.reduce also reduces each replica's rows, whose numbers may differ."
            )


def as_axis(axis: object) -> int:
    """The dimension to gather along.

    Raises:
        ValueError: If it is None.
        TypeError: If it is no integer.
    """
    if axis is None:
        raise ValueError("The axis to gather along is an integer; got None.")
    try:
        return operator.index(axis)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"The axis to gather along is an integer; got {axis!r}.") from None


def check_gatherable(tensors: Sequence[torch.Tensor], axis: int) -> None:
    """Raises an error for tensors that cannot be concatenated along `axis`.

    Raises:
        ValueError: If the values are scalars, or differ in rank, dtype or another dimension; or have no such axis.
    """
    first = tensors[0]
    if first.dim() == 0:
        raise ValueError(
            "Scalars cannot be gathered: they have no axis. Use unsqueeze(0) in the step, and gather along 0."
        )
    if not -first.dim() <= axis < first.dim():
        raise ValueError(f"There is no axis {axis} to gather along: the values have {first.dim()} dimensions.")
    for tensor in tensors[1:]:
        fits = tensor.dim() == first.dim() and tensor.dtype == first.dtype
        if not fits or _without(tensor.shape, axis) != _without(first.shape, axis):
            raise ValueError(
                f"The replicas' values cannot be gathered along axis {axis}: {_described(tensors)}. They may differ "
                "only in the size of that axis."
            )


def _without(shape: torch.Size, axis: int) -> list[int]:
    sizes = list(shape)
    del sizes[axis]
    return sizes


def _described(tensors: Sequence[torch.Tensor]) -> str:
    return " and ".join(dict.fromkeys(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors))
