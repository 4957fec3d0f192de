"""What parameters are called in the program's modules."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn

_WRAPPER = "module."  # how `DistributedDataParallel` calls what it wraps


def names_of(parameters: Sequence[torch.Tensor]) -> list[str]:
    """The name of each in the largest module that has it; its shape if none has. It looks at all objects: ask once."""
    wanted = {id(parameter) for parameter in parameters}
    names: dict[int, str] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module):
            continue
        for name, parameter in thing.named_parameters():
            if id(parameter) in wanted:
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
    return [names.get(id(one), "").removeprefix(_WRAPPER) or f"a parameter of {shape_of(one)}" for one in parameters]


def shape_of(tensor: torch.Tensor) -> str:
    """Its shape in words: `4x8`."""
    return "x".join(map(str, tensor.shape)) or "1"
