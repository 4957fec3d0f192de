"""Exact copies of samples on another device.

The same numbers, sizes, strides, offsets and sharing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")


def copied(
    tree: Any,
    device: torch.device,
    stray: tuple[torch.Tensor, torch.device] | None = None,
) -> Any:
    """A copy of a sample on a device, but for one tensor of it, which goes to another.

    What names the CPU names the device instead, and what shared memory still does.
    """
    # The copy of each storage, by its address and its device.
    memory: dict[Any, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}  # the copy of each tensor, by its id

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = stray[1] if stray is not None and value is stray[0] else device
            if id(value) not in made:
                made[id(value)] = _copied(value, place, memory)
            return made[id(value)]
        return device if _is_cpu(value) else value

    return tree_map(copy, tree)


def _is_cpu(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and value in ("cpu", CPU)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a sample, each once."""
    found = {
        id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    }
    return list(found.values())


def names_a_device(tree: Any) -> bool:
    """Whether a sample says where its result should be: by a tensor, or by a device."""
    return bool(tensors(tree)) or any(map(_is_cpu, tree_leaves(tree)))


def _copied(
    tensor: torch.Tensor, device: torch.device, memory: dict[Any, torch.Tensor]
) -> torch.Tensor:
    source = tensor.detach()
    if source.layout is not torch.strided or type(source) is not torch.Tensor:
        made = source.to(device, copy=True)
    elif source.is_conj():
        made = _copied(source.conj(), device, memory).conj()
    elif source.is_neg():
        made = torch._neg_view(_copied(torch._neg_view(source), device, memory))
    else:
        made = _placed(source, device, memory)
    return made.requires_grad_(tensor.requires_grad)


def _placed(
    source: torch.Tensor, device: torch.device, memory: dict[Any, torch.Tensor]
) -> torch.Tensor:
    storage = source.untyped_storage()
    place = (storage.data_ptr(), device)
    if place not in memory:
        memory[place] = (
            torch.empty(0, dtype=torch.uint8).set_(storage).to(device, copy=True)
        )
    made = torch.empty(0, dtype=source.dtype, device=device)
    return made.set_(
        memory[place].untyped_storage(),
        source.storage_offset(),
        source.size(),
        source.stride(),
    )
