"""Copies of tensors for a replica, which share memory where the user's do.

`tensor.clone()` of each by itself would not do: of two views of one buffer, a write on
one shows in the other, and in the replica it would not. So tensors that share memory
are copied as one piece of memory, and the copies are views of it. The weights of a
recurrent layer are in one piece of memory, too, though each is a parameter of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchstrategy._base.memory import extent, memory_id
from torchstrategy._base.recurrent_layers import flatten_weights
from torchstrategy._base.torch_internals import flat_weights
from torchstrategy._base.types import Device
from torchstrategy._group.transfer import detached_copy

_ALIGNMENT = 16  # bytes; the elements of any dtype may begin there


def copy_tensors(tensors: Sequence[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """A copy on a device of each of some tensors.

    Copies of tensors that share memory share memory.
    """
    groups = group_by_memory(tensors)
    shared = {index for group in groups for index in group}
    # Each by itself: tensors that were sent together would be parts of one piece of
    # memory.
    copies = {
        i: detached_copy(tensor, device)
        for i, tensor in enumerate(tensors)
        if i not in shared
    }
    for group in groups:
        copies.update(
            zip(
                group,
                _copy_together([tensors[index] for index in group], device),
                strict=True,
            )
        )
    return [copies[index] for index in range(len(tensors))]


def group_by_memory(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of the tensors that share memory with others of them, in groups."""
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(tensors):
        if (
            tensor.layout is torch.strided
            and tensor.numel()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            by_storage.setdefault(memory_id(tensor), []).append(
                (*extent(tensor), index)
            )
    groups: list[list[int]] = []
    for extents in by_storage.values():
        if len(extents) > 1:
            end = -1
            for start, stop, index in sorted(extents):
                if start >= end:
                    groups.append([])
                groups[-1].append(index)
                end = max(end, stop)
    return [sorted(group) for group in groups if len(group) > 1]


def _copy_together(
    tensors: Sequence[torch.Tensor], device: Device
) -> list[torch.Tensor]:
    extents = [extent(tensor) for tensor in tensors]
    start = min(start for start, _ in extents) // _ALIGNMENT * _ALIGNMENT
    stop = max(stop for _, stop in extents)
    smallest = min(tensors, key=torch.Tensor.element_size).detach()
    size = smallest.element_size()
    memory = smallest.as_strided(((stop - start) // size,), (1,), start // size)
    # A view of any dtype needs a whole number of its elements.
    padded = memory.new_empty(-(-(stop - start) // _ALIGNMENT) * _ALIGNMENT // size)
    padded[: len(memory)] = memory
    copied = detached_copy(padded, device)
    return [
        copied.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), (begins - start) // tensor.element_size()
        )
        for tensor, (begins, _) in zip(tensors, extents, strict=True)
    ]


def lay_in_one_piece(layers: Sequence[nn.RNNBase], own: Sequence[torch.Tensor]) -> None:
    """Puts the weights of each recurrent layer into one piece of memory, for cuDNN.

    Args:
        layers: A replica's layers.
        own: The parameters that the replica has copies of. A layer with other weights,
            or with weights that share memory, stays as it is.
    """
    shared = {index for group in group_by_memory(own) for index in group}
    movable = {id(tensor) for index, tensor in enumerate(own) if index not in shared}
    for layer in layers:
        if movable.issuperset(map(id, flat_weights(layer))):
            flatten_weights(layer)


def set_trained(parameters: Sequence[torch.Tensor], flags: Sequence[bool]) -> None:
    """Says which of some parameters are trained."""
    for parameter, flag in zip(parameters, flags, strict=True):
        parameter.requires_grad_(flag)
