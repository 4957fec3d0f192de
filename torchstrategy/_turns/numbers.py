"""Whether tensors hold the same numbers."""

from __future__ import annotations

import torch

from torchstrategy._group.transfer import equal


def are_same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same form and numbers, wherever they are.

    NaN is the same as NaN: replicas that computed alike have both.
    """
    other = other.to(one.device)
    if one.dtype.is_floating_point and one.element_size() == 1:
        if one.dtype != other.dtype:
            return False
        one, other = one.float(), other.float()  # torch does not compare float8
    if equal(one, other):
        return True
    if (
        one.shape != other.shape
        or one.layout != other.layout
        or one.dtype != other.dtype
    ):
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(same_places(one, other).all())


def same_places(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """For each place of two tensors, whether they hold the same number there."""
    return (one == other) | ((one != one) & (other != other))
