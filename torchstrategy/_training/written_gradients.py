"""Gradients on an accelerator that every replica has written, as clipping does.

Mostly all replicas have done the same to the gradient of the whole batch, and it becomes what they have made of it.
Else each has put a gradient of its own rows there, and these are weighed. Which of the two it is, the accelerator finds
out: to read the answer, the host would wait for all that is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torchstrategy._core.torch_internals import foreach_norm, foreach_sub


def can_be_chosen(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether `choose` takes the gradients of one parameter, all of which are on one device."""
    first = gradients[0]
    are_dense = all(one.layout is torch.strided and not one.is_cpu and one.numel() for one in gradients)
    return are_dense and all((one.shape, one.dtype) == (first.shape, first.dtype) for one in gradients)


def choose(
    columns: Sequence[Sequence[torch.Tensor]], merge: Callable[[int, Sequence[torch.Tensor]], torch.Tensor]
) -> list[torch.Tensor]:
    """For each parameter the gradient that all replicas have, or else what `merge` makes of theirs.

    Args:
        columns: For each parameter the gradients of all replicas.
        merge: Is called with the position of a column, and with the column.
    """
    first, *others = zip(*columns, strict=True)
    # The largest difference is 0 only where all numbers are equal: a NaN is equal to nothing, as for `torch.equal`.
    differences = [torch.stack(list(foreach_norm(foreach_sub(row, first), math.inf))) for row in others]
    are_equal = (torch.stack(differences) == 0).all(0).unbind()
    return [
        torch.where(is_equal, column[0], merge(position, column))
        for position, (is_equal, column) in enumerate(zip(are_equal, columns, strict=True))
    ]
