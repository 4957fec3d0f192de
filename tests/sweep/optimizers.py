"""torch's own database of optimizers: three steps with each of their options.

Each in each way that they can be run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_optimizers import optim_db

from sweep.agreement import Trial
from sweep.copies import CPU, copied


@functools.cache
def _entries() -> dict[str, Any]:
    return {entry.optim_cls.__name__: entry for entry in optim_db}


def names() -> list[str]:
    """Every entry, by name."""
    return sorted(_entries())


def trials(
    name: str, count: int, dtype: torch.dtype = torch.float32
) -> Iterator[Trial]:
    """All options of an entry: as torch chooses, as a loop, on lists and fused.

    `count` limits none: they are few.
    """
    entry = _entries()[name]
    for sample in entry.optim_inputs_func("cpu"):
        for way in (
            "as torch chooses",
            *(way for way in _WAYS if way in entry.supported_impls),
        ):
            if way != "fused" or "cpu" in entry.supports_fused_on:
                yield Trial(
                    f"{sample.desc}, {way}",
                    functools.partial(_run, entry, sample.kwargs, way, dtype),
                )


_WAYS = ("foreach", "fused")


def _run(
    entry: Any,
    options: dict[str, Any],
    way: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    sizes = (
        [(4, 3), (3, 2)] if entry.optim_cls is torch.optim.Muon else [(4, 3), (3,), ()]
    )
    parameters = [_random(size, dtype, device).requires_grad_() for size in sizes]
    chosen = {way: True} if way in _WAYS else {}
    optimizer = entry.optim_cls(parameters, **copied(options, device), **chosen)
    for _ in range(3):
        for parameter in parameters:
            gradient = _random(parameter.shape, dtype, device)
            parameter.grad = (
                gradient.to_sparse() if entry.only_supports_sparse_grads else gradient
            )
        optimizer.step(
            (lambda: (parameters[0] ** 2).sum())
            if entry.step_requires_closure
            else None
        )
    return {
        "parameters": parameters,
        "state": [_on(device, optimizer.state[parameter]) for parameter in parameters],
    }


def _random(size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return copied(torch.randn(size, dtype=dtype, device=CPU), device)


# Single numbers, which torch keeps on the CPU unless the optimizer is fused.
_COUNTS = {"step", "mu_product"}


def _on(device: torch.device, state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.as_tensor(value).to(device) if name in _COUNTS else value
        for name, value in state.items()
    }
