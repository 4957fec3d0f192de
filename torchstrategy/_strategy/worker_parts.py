"""`Strategy.reduce` and `Strategy.gather` over the replicas of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchstrategy._communication.reductions import as_tensor, check_addable, gathered, size_along, summed_along
from torchstrategy._communication.workers import Workers
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import Device, Tree


class WorkerParts(NamedTuple):
    """What one worker brings to a reduction.

    Attributes:
        values: The values of its replicas; or one value that only tells the shape and dtype of what others bring.
        matter: Whether the values count.
    """

    values: Sequence[Tree]
    matter: bool


def reduced_over_workers(
    workers: Workers, op: ReduceOp, parts: WorkerParts, axis: int | tuple[int, ...] | None, device: Device
) -> torch.Tensor:
    """The sum or mean over the replicas of all workers, on `device`; if `axis` is given, along that axis, too."""
    tensors = [as_tensor(value).to(device) for value in parts.values]
    if axis is None:
        check_addable(tensors)
        summed, size = tensors, len(tensors)
    else:
        summed = [summed_along(tensor, axis) for tensor in tensors]
        size = sum(size_along(tensor, axis) for tensor in tensors)
    total = summed[0].clone()
    for tensor in summed[1:]:
        total = total + tensor
    if not parts.matter:
        total, size = torch.zeros_like(total), 0
    name = f"reduce({op.value})"
    total, sizes = workers.all_reduce([total, torch.tensor(size)], name)
    return total if op is ReduceOp.SUM else total / sizes.item()


def gathered_over_workers(workers: Workers, parts: WorkerParts, axis: int, device: Device) -> torch.Tensor:
    """The values of all replicas of all workers, concatenated along `axis`, on `device`."""
    whole = gathered(parts.values, axis, device)
    whole = whole if parts.matter else whole.narrow(axis, 0, 0)
    return torch.cat(workers.all_gather(whole, axis % whole.dim(), f"gather(axis={axis})"), axis)
