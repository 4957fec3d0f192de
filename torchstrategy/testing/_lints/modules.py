"""The modules that the program has, and what parameters are called in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch
from torch import nn

WRAPPER = "module."  # how `DistributedDataParallel` calls what it wraps


def living_modules() -> Iterator[nn.Module]:
    """All modules that there are. It looks at all objects of Python: ask seldom."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))


def owners_of(parameter: torch.Tensor) -> list[nn.Module]:
    """The modules that have a parameter, also in a module of theirs."""
    return [module for module in living_modules() if any(own is parameter for own in module.parameters())]


def longest_names(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """The name of each in the largest module that has it, by id. Those that no module has are left out."""
    wanted = {id(parameter) for parameter in parameters}
    names: dict[int, str] = {}
    for module in living_modules():
        for name, parameter in module.named_parameters():
            if id(parameter) in wanted:
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
    return names


def names_of(parameters: Sequence[torch.Tensor]) -> list[str]:
    """The name of each in what the program has wrapped; its shape if no module has it."""
    names = longest_names(parameters)
    return [names.get(id(one), "").removeprefix(WRAPPER) or nameless(one.shape) for one in parameters]


def nameless(shape: Sequence[int]) -> str:
    """What to call a parameter that no module has: `a parameter of 4x8`."""
    return f"a parameter of {'x'.join(map(str, shape)) or '1'}"
