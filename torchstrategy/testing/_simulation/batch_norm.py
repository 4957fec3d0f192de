"""The kernels of `torch.nn.SyncBatchNorm`, which torch has for GPUs only.

A process computes the mean and the inverted standard deviation of its rows, gathers
those of all processes, and normalizes its rows by the statistics of all. The backward
adds up two sums over all processes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchstrategy.testing._simulation.backend import Backend, operator
from torchstrategy.testing._simulation.kernels import written_for_cpu


def register(backend: Backend) -> None:
    """Registers the kernels."""
    for name, function in _KERNELS.items():
        backend.kernel(name)(written_for_cpu(operator(name), function))


# Statistics of tensors of a lower precision are computed in float32, as on GPUs.


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _but_channels(tensor: torch.Tensor) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Statistics of shape (channels,), in a shape that multiplies with a tensor.

    The tensor has the shape (rows, channels, ...).
    """
    return _precise(values).view(-1, *[1] * (like.dim() - 2))


def _stats(inputs: Any, eps: float) -> Any:
    variance, mean = torch.var_mean(
        _precise(inputs), _but_channels(inputs), correction=0
    )
    return mean, (variance + eps).rsqrt()


def _gather_stats(
    inputs: Any,
    mean: Any,
    invstd: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
) -> Any:
    weights = counts.to(mean.dtype).view(-1, 1)
    total = weights.sum()
    whole = (mean * weights).sum(0) / total
    squares = (weights * (invstd**-2 - eps + (mean - whole) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return whole, (squares / total + eps).rsqrt()


def _normalized(
    inputs: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float
) -> Any:
    outputs = (_precise(inputs) - _per_channel(mean, inputs)) * _per_channel(
        invstd, inputs
    )
    if weight is not None:
        outputs = outputs * _per_channel(weight, inputs)
    if bias is not None:
        outputs = outputs + _per_channel(bias, inputs)
    return outputs.to(inputs.dtype)


def _backward_sums(
    gradient: Any,
    inputs: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> Any:
    of_outputs, axes = _precise(gradient), _but_channels(gradient)
    total = of_outputs.sum(axes)
    centered = (of_outputs * (_precise(inputs) - _per_channel(mean, inputs))).sum(axes)
    dtype = gradient.dtype if weight is None else weight.dtype
    return (
        total if of_input else None,
        centered if of_input else None,
        (centered * invstd).to(dtype) if of_weight else None,
        total.to(dtype, copy=True) if of_bias else None,
    )


def _backward(
    gradient: Any,
    inputs: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    total: Any,
    centered: Any,
    count: Any,
) -> Any:
    rows = count.sum()
    mean_gradient = _per_channel(total / rows, inputs)
    slope = _per_channel(centered / rows * invstd**2, inputs)
    scale = invstd if weight is None else invstd * _precise(weight)
    from_mean = (_precise(inputs) - _per_channel(mean, inputs)) * slope
    return (
        (_precise(gradient) - mean_gradient - from_mean) * _per_channel(scale, inputs)
    ).to(gradient.dtype)


_KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _normalized,
    "batch_norm_backward_reduce": _backward_sums,
    "batch_norm_backward_elemt": _backward,
}
