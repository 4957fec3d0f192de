"""Copies and sums between devices: the only caller of `torch.nn.parallel`.

Its primitives know only CUDA devices, each at most once; there they move many tensors in few transfers. Everywhere
else, the CPU included, plain copies do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import comm

from torchstrategy._devices import place
from torchstrategy._types import Device


def sent_to(tensors: Sequence[torch.Tensor], devices: Sequence[Device]) -> list[list[torch.Tensor]]:
    """A copy of all `tensors` for each device; a copy never shares memory with the original.

    Args:
        tensors: Tensors of one device. No gradient flows through the copies.
        devices: Where to; one and the same device may stand there several times.
    """
    originals = [tensor.detach() for tensor in tensors]
    if originals and _are_distinct_cuda([originals[0].device, *devices]):
        copies = comm.broadcast_coalesced(originals, [originals[0].device, *devices])
        return [list(copy) for copy in copies[1:]]
    return [[tensor.to(place(device), copy=True) for tensor in originals] for device in devices]


def added(tensors: Sequence[torch.Tensor], device: Device) -> torch.Tensor:
    """The sum of tensors of one shape on any devices, as a new tensor on `device`. Differentiable."""
    target = place(device)
    if len(tensors) > 1 and _are_distinct_cuda([t.device for t in tensors]) and not _any_requires_grad(tensors):
        total: torch.Tensor = comm.reduce_add(list(tensors), target.index if target.type == "cuda" else None)
        return total.to(target)
    total = tensors[0].to(target)
    for tensor in tensors[1:]:
        total = total + tensor.to(target)
    return total.clone() if total is tensors[0] else total


def concatenated(tensors: Sequence[torch.Tensor], axis: int, device: Device) -> torch.Tensor:
    """Tensors on any devices, one after the other along `axis`, on `device`. Differentiable."""
    return torch.cat([tensor.to(place(device)) for tensor in tensors], dim=axis)


def _are_distinct_cuda(devices: Sequence[Device]) -> bool:
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)


def _any_requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
