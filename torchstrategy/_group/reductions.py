"""The arithmetic of `Strategy.reduce` and `Strategy.gather`.

It checks which values fit together, and adds up sparse tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchstrategy._base.errors import as_int
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.types import Device, Tree, VariableBase
from torchstrategy._group.transfer import concatenate_on, sum_on
from torchstrategy._group.workers import LONE, Workers


def as_tensor(value: Tree) -> torch.Tensor:
    """A leaf of a reduction as a tensor; numbers and arrays are converted.

    Raises:
        TypeError: If it has no numbers.
        ValueError: If it is None.
    """
    if isinstance(value, torch.Tensor):
        return value.clone() if isinstance(value, VariableBase) else value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        kind = ValueError if value is None else TypeError
        raise kind(
            "Only tensors, arrays and numbers can be combined across replicas; got "
            f"{value!r}."
        ) from None


def check_addable(tensors: Sequence[torch.Tensor]) -> None:
    """Raises an error for tensors whose sum needs broadcasting or a conversion.

    Raises:
        ValueError: If their shapes or dtypes differ.
    """
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"The replicas' values cannot be added: {_describe(tensors)}. They "
                "must be of one shape and dtype; with `axis=0`, Strategy.reduce also "
                "reduces each replica's rows, whose numbers may differ."
            )


def as_axis(axis: object) -> int:
    """The dimension to gather along.

    Raises:
        ValueError: If it is None.
        TypeError: If it is no integer.
    """
    if axis is None:
        raise ValueError("The axis to gather along is an integer; got None.")
    return as_int(axis, f"The axis to gather along is an integer; got {axis!r}.")


def check_gatherable(tensors: Sequence[torch.Tensor], axis: int) -> None:
    """Raises an error for tensors that cannot be concatenated along `axis`.

    Raises:
        ValueError: If the values are scalars, or differ in rank, dtype or another
            dimension; or have no such axis.
    """
    first = tensors[0]
    if first.dim() == 0:
        raise ValueError(
            "Scalars cannot be gathered: they have no axis. Use unsqueeze(0) in the "
            "step, and gather along 0; or write "
            'strategy.reduce("mean", value, axis=None) for one number.'
        )
    if not -first.dim() <= axis < first.dim():
        raise ValueError(
            f"There is no axis {axis} to gather along: the values have {first.dim()} "
            "dimensions."
        )
    others = [
        dimension for dimension in range(first.dim()) if dimension != axis % first.dim()
    ]
    for tensor in tensors[1:]:
        fits = tensor.dim() == first.dim() and tensor.dtype == first.dtype
        if not fits or any(tensor.shape[i] != first.shape[i] for i in others):
            raise ValueError(
                f"The replicas' values cannot be gathered along axis {axis}: "
                f"{_describe(tensors)}. They may differ only in the size of that axis."
            )


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return " and ".join(
        dict.fromkeys(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
    )


def reduce_values(
    op: ReduceOp,
    axis: int | tuple[int, ...] | None,
    values: Sequence[Tree],
    device: Device,
    workers: Workers = LONE,
    matter: bool = True,
) -> torch.Tensor:
    """The sum or mean of the values of all workers, on `device`.

    With an axis, along which the sizes of values may differ, each value is summed along
    the axis, and then the sums are added. The mean divides by the total size along the
    axis: it is the mean over all rows.

    Args:
        op: The reduction.
        axis: The axis, or several. None: the values are added as they are.
        values: The values of this worker; or one value that only tells the shape and
            dtype of what others bring.
        device: The device of the result.
        workers: The processes that have values.
        matter: Whether the values of this worker count.

    Raises:
        ValueError: If there is no such axis, or what is added differs in shape.
        TypeError: If `axis` is neither an integer nor a tuple of them.
    """
    if axis is None:
        sums, size = [as_tensor(value) for value in values], len(values)
    else:
        pairs = [sum_along(value, axis) for value in values]
        sums, size = [total for total, _ in pairs], sum(rows for _, rows in pairs)
    check_addable(sums)
    total = sum_on(sums, device)
    if not matter:
        total, size = torch.zeros_like(total), 0
    total, everyones = workers.all_reduce(
        [total, torch.tensor(size, device="cpu")], f"reduce({op.value})"
    )
    return total if op is ReduceOp.SUM else total / everyones.item()


def sum_along(value: Tree, axis: int | tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The sum of one value along one or several axes, and how many rows it added.

    It counts the rows for each element of the sum.

    Raises:
        ValueError: If there is no such axis.
        TypeError: If `axis` is neither an integer nor a tuple of them.
    """
    tensor, axes = as_tensor(value), axis if isinstance(axis, tuple) else (axis,)
    if not all(isinstance(a, int) for a in axes):
        raise TypeError(
            f"The axis to reduce along is an integer or a tuple of them; got {axis!r}."
        )
    for a in axes:
        if not -tensor.dim() <= a < tensor.dim():
            text = (
                f"There is no axis {a} to reduce along: a value has the shape "
                f"{tuple(tensor.shape)}."
            )
            if not tensor.dim():
                text += (
                    " Each replica has one number, so write axis=None. If it is a mean "
                    "over the replica's rows, write "
                    'reduce("mean", value, axis=None, weights=batch), where batch is '
                    "what the step was called with."
                )
            raise ValueError(text)
    if len({a % tensor.dim() for a in axes}) < len(axes):
        raise ValueError(
            f"axis={axis!r} names a dimension twice: a value has the shape "
            f"{tuple(tensor.shape)}."
        )
    total = tensor.sum(
        dim=axes, dtype=None if tensor.dtype == torch.bool else tensor.dtype
    )
    return total, math.prod(tensor.shape[a] for a in axes)


def gather_values(
    axis: int,
    values: Sequence[Tree],
    device: Device,
    workers: Workers = LONE,
    matter: bool = True,
) -> torch.Tensor:
    """The values of all workers, concatenated along `axis`, on `device`.

    The arguments are as for `reduce_values`.

    Raises:
        ValueError: If they are scalars, there is no such axis, or they differ elsewhere
            than along it.
    """
    tensors = [as_tensor(value) for value in values]
    check_gatherable(tensors, axis)
    whole = concatenate_on(tensors, axis, device)
    if workers.count == 1:
        return whole
    whole = whole if matter else whole.narrow(axis, 0, 0)
    return torch.cat(
        workers.all_gather(whole, axis % whole.dim(), f"gather(axis={axis})"), axis
    )


def sum_of_sparse(
    workers: Workers, own: torch.Tensor | None, parameter: torch.Tensor, name: str
) -> torch.Tensor:
    """The sum of the workers' weighted gradients of a parameter, which are all sparse.

    Args:
        workers: The processes that train together.
        own: The gradient of this worker; None if it has none.
        parameter: The parameter.
        name: The name of the exchange.
    """
    if own is None:
        nowhere = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        nothing = parameter.new_empty((0, *parameter.shape[1:]))
        own = torch.sparse_coo_tensor(
            nowhere, nothing, parameter.shape, check_invariants=False
        )
    own = own.coalesce()
    indices = torch.cat(workers.all_gather(own.indices(), 1, name), 1)
    values = torch.cat(workers.all_gather(own.values(), 0, name))
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, check_invariants=False
    ).coalesce()
