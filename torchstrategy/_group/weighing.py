"""Gradients times the weights of their replicas, and the sums of these.

`participants` says how much each replica counts. Here is what multiplies by it where
several replicas share a process; the Note below lists all other places.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torchstrategy._base import torch_internals

# Note [Where a gradient is weighed]
# A gradient of a replica is multiplied by the weight of the replica once, on its way
# into the sum over all replicas. The weight comes from `participants`. It follows from
# the rows of the batch, or from `RunOptions` and the `examples` of a constructor:
# `_run/example_counts` asks the function that was given there, and `_run/losses` finds
# by what a loss was divided. The product is made in one of these places:
# 1. Several replicas of one process, whose gradients are added up on the device of the
#    parameter: `add_weighted`, which `_copies/gradients/gradient_reducer` calls.
# 2. The same by an all-reduce: `scale`, which `CrossDeviceOps._weighted_sums` in
#    `_parity/cross_device_ops` calls.
# 3. Gradients that the steps of several replicas have put into `.grad` themselves:
#    `weighted_sum`, which `_copies/gradients/gradient_reducer` calls; and over workers,
#    `_copies/gradients/worker_gradients`.
# 4. A worker with one replica: `weigh` and `weigh_into` in `_run/own/gradient_parts`,
#    before `_run/own/sent_gradients` sends them. If a count travels with them
#    (`_run/own/counted_gradients`), their sums are corrected by it. What its step has
#    put into `.grad` itself: `_run/own/assigned_gradients`. Of sharded models, which
#    send their gradients themselves: hooks of `_run/own/sharded_models`.
# No gradient comes to two of them, or it would count twice. One that a backward makes
# between runs comes to none. Where the weight is 0, the gradient is dropped and not
# multiplied: it may be NaN, and 0 times NaN is NaN.
#
# Two files reckon with this product beforehand, so that it comes out right:
# `nn/_losses` divides a loss by the weight of the replica, and `group` scales gradients
# that flow through a collective of the step.
#
# What is no gradient is weighed where it is put together. The loss of an optimizer with
# a closure: in `_copies/replicated_run` and `_run/own/own_objects`. By fractions of the
# rows, whatever gradients are weighed by: running statistics in
# `_copies/modules/replicated_modules` and `_run/own/pack_memory`, and states of metrics
# in `_run/metrics`.


def weighted_sum(
    tensors: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """The sum of tensors, each multiplied by its weight, as a new tensor."""
    return functools.reduce(torch.add, map(torch.mul, tensors, weights))


def add_weighted(
    total: dict[int, torch.Tensor],
    gradients: dict[int, torch.Tensor],
    weight: float,
    are_ours: bool = False,
) -> None:
    """`total += weight * gradients`, parameter by parameter, in fused loops.

    If `are_ours`, the library owns the gradients: they may be written, and become the
    total themselves. Gradients of others are not written.
    """
    fresh = [index for index in gradients if index not in total]
    known = [index for index in gradients if index in total] if total else []
    if not torch_internals.are_dense((*gradients.values(), *total.values())):
        for index in known:
            total[index] = total[index] + gradients[index] * weight
        total.update((index, gradients[index] * weight) for index in fresh)
        return
    if known:
        totals = [total[index] for index in known]
        torch_internals.foreach_add_(
            totals, [gradients[index] for index in known], alpha=weight
        )
    if fresh:
        new = [gradients[index] for index in fresh]
        # Backward may give one gradient to two parameters.
        if are_ours and torch_internals.are_alone_in_memory(new):
            if weight != 1:
                torch_internals.foreach_mul_(new, factor_for(weight, new))
        else:
            new = list(torch_internals.foreach_mul(new, weight))
        total.update(zip(fresh, new, strict=True))


def factor_for(weight: float, tensors: Sequence[torch.Tensor]) -> float | torch.Tensor:
    """A number by which to multiply tensors.

    On the CPU it is a tensor, since torch makes one of a number for each product.
    """
    is_usual = torch_internals.kinds_of(tensors) in (
        {(torch.float32, True)},
        {(torch.float64, True)},
    )
    return (
        torch.tensor(weight, dtype=tensors[0].dtype, device="cpu")
        if is_usual
        else weight
    )


def scale(
    tensors: Sequence[torch.Tensor | None], weight: float
) -> Sequence[torch.Tensor | None]:
    """Each of some tensors, multiplied by a weight.

    If the weight is 0, you get None in place of all tensors.
    """
    if weight == 1:
        return tensors
    known: dict[int, torch.Tensor] = {}
    if weight:
        known = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
    scaled: dict[int, torch.Tensor] = {}
    add_weighted(scaled, known, weight)
    return [scaled.get(i) for i in range(len(tensors))]
