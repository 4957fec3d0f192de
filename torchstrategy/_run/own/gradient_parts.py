"""What happens to one parameter's gradient on its way to the workers and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrategy._base.torch_internals import are_contiguous, raw_grads
from torchstrategy._run.own.gradient_plans import dtype_of_gradient


def with_gradients(
    parameters: Sequence[torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters that have a gradient, each with it."""
    gradients = raw_grads(parameters)
    if _ONLY_NONE.issuperset(map(type, gradients)):  # as mostly
        return []
    pairs = zip(parameters, gradients, strict=True)
    return [
        (parameter, gradient) for parameter, gradient in pairs if gradient is not None
    ]


_ONLY_NONE = frozenset({type(None)})


def weigh(numbers: torch.Tensor, weight: float | torch.Tensor) -> None:
    """Multiplies numbers in place by the weight of a replica.

    What does not count may be NaN, and 0 * NaN is NaN.
    """
    # The weight is on an accelerator, and the host does not wait for it.
    if isinstance(weight, torch.Tensor):
        weight = weight.to(numbers.device)
        numbers.mul_(weight).masked_fill_(weight == 0, 0)
    elif not weight:
        numbers.zero_()
    elif weight != 1.0:
        numbers.mul_(weight)


def weigh_into(
    out: torch.Tensor, numbers: torch.Tensor, weight: float | torch.Tensor
) -> None:
    """The same as `weigh`, with the products in other memory."""
    if isinstance(weight, torch.Tensor):
        weight = weight.to(numbers.device)
        torch.mul(numbers, weight, out=out).masked_fill_(weight == 0, 0)
    elif not weight:
        out.zero_()
    else:
        torch.mul(numbers, weight, out=out)


def multiply(numbers: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiplies numbers in place."""
    numbers.mul_(
        factor.to(numbers.device) if isinstance(factor, torch.Tensor) else factor
    )


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def as_sent(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """What a worker sends for a parameter.

    It sends zeros if it has no gradient where another worker has one.
    """
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype_of_gradient(parameter))
    return as_dense(gradient)


def all_laid_out(
    totals: list[torch.Tensor | None], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients in their parameters' memory layouts, as fused updates want them."""
    return (
        totals
        if all(are_contiguous(parameters))
        else list(map(_laid_out, totals, parameters))
    )


def _laid_out(
    total: torch.Tensor | None, parameter: torch.Tensor
) -> torch.Tensor | None:
    if total is None or total.is_sparse or total.stride() == parameter.stride():
        return total
    return torch.empty_like(parameter, dtype=total.dtype).copy_(total)


def add(old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    """The sum of the gradient from before a backward and the one of the backward.

    The sum is in the memory in which autograd adds.
    """
    if new is None:
        return old
    if old.is_sparse or new.is_sparse or old.requires_grad:
        return new + old if old.is_sparse else old + new
    return old.add_(new)


class _WithoutGraph(torch.autograd.Function):
    """The gradient of the whole batch, which itself has no gradient.

    Other workers hold parts of its graph.
    """

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "A loss was made of parameter.grad after backward(create_graph=True), and "
            "differentiated. This .grad is the sum over all workers, and a worker has "
            "no graph of the others. Take the gradient of this worker's own rows, "
            "torch.autograd.grad(loss, parameters, create_graph=True), and make the "
            "loss of it."
        )


_without_graph: Callable[..., torch.Tensor] = _WithoutGraph.apply


def refuse_graphs(parameters: Sequence[torch.Tensor]) -> None:
    """Lets a backward that comes to a gradient of the whole batch raise an error."""
    with torch.enable_grad():
        for parameter, gradient in zip(parameters, raw_grads(parameters), strict=True):
            if gradient is not None:
                gate = torch.ones((), requires_grad=True)
                parameter.grad = _without_graph(gradient, gate)
