"""Weighted sums of gradients, of one parameter in any layout or of many parameters at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchstrategy._core.torch_internals import are_alone_in_memory, are_dense, foreach_add_, foreach_mul, foreach_mul_


def equal(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Whether two gradients have the same numbers, layout, shape and dtype."""
    if second is None or first.layout != second.layout or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.layout is torch.sparse_coo:
        one, other = first.coalesce(), second.coalesce()
        return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())
    return torch.equal(first, second)


def weighted(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The sum of tensors, each multiplied by its weight, as a new tensor."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor * weight
    return total


def accumulate(
    total: dict[int, torch.Tensor], gradients: dict[int, torch.Tensor], weight: float, are_ours: bool = False
) -> None:
    """`total += weight * gradients`, parameter by parameter, in fused loops.

    If `are_ours`, the library owns the gradients: they may be written, and become the total themselves. Gradients of
    others are not written.
    """
    fresh = [index for index in gradients if index not in total]
    known = [index for index in gradients if index in total] if total else []
    if not are_dense((*gradients.values(), *total.values())):
        for index in known:
            total[index] = total[index] + gradients[index] * weight
        total.update((index, gradients[index] * weight) for index in fresh)
        return
    if known:
        foreach_add_([total[index] for index in known], [gradients[index] for index in known], alpha=weight)
    if fresh:
        new = [gradients[index] for index in fresh]
        if are_ours and are_alone_in_memory(new):  # backward may give one gradient to two parameters
            foreach_mul_(new, weight)
        else:
            new = list(foreach_mul(new, weight))
        total.update(zip(fresh, new, strict=True))
