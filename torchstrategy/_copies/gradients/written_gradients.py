"""Gradients on an accelerator that every replica has written, as clipping does.

Mostly all replicas have done the same to the gradient of the whole batch, and it
becomes what they have made of it. Else each has put a gradient of its own rows there,
and these are weighed. Which of the two it is, the accelerator finds out: to read the
answer, the host would wait for all that is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from torchstrategy._base.torch_internals import foreach_norm, foreach_sub


def can_be_chosen(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether `choose` takes one parameter's gradients, all on one device."""
    first = gradients[0]
    are_dense = all(
        one.layout is torch.strided and not one.is_cpu and one.numel()
        for one in gradients
    )
    return are_dense and all(
        (one.shape, one.dtype) == (first.shape, first.dtype) for one in gradients
    )


def choose(
    columns: Mapping[int, Sequence[torch.Tensor]],
    merge: Callable[[int, Sequence[torch.Tensor]], torch.Tensor],
) -> dict[int, torch.Tensor]:
    """For each parameter the gradient that all replicas have, or what `merge` makes.

    Args:
        columns: By the positions of parameters, the gradients of all replicas.
        merge: Is called with a position, and with the gradients of this parameter.
    """
    first, *others = zip(*columns.values(), strict=True)
    # The largest difference is 0 only where all numbers are equal: a NaN is equal to
    # nothing, as for `torch.equal`.
    differences = [
        torch.stack(list(foreach_norm(foreach_sub(row, first), math.inf)))
        for row in others
    ]
    are_equal = (torch.stack(differences) == 0).all(0).unbind()
    return {
        index: torch.where(is_equal, column[0], merge(index, column))
        for is_equal, (index, column) in zip(are_equal, columns.items(), strict=True)
    }
