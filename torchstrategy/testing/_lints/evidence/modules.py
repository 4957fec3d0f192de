"""The modules that the program has, and what they have."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from torchstrategy.testing._lints.evidence.asking import attribute
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.torch_internals import Dropout, NormBase, held_by

WRAPPER = "module."  # how `DistributedDataParallel` calls what it wraps
_STATISTICS = "running_mean"

# Note [Modules of the program]
# A class of the program may have a `parameters` of its own, with other arguments or
# groups for an optimizer. It may have no hash, or an `==` that gives a tensor, and its
# `__init__` may not have called that of torch. So lints ask for what a module has by
# these functions, which call nothing of the program.


def living_modules() -> Iterator[nn.Module]:
    """All modules that there are. It looks at all objects of Python: ask seldom."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))


def modules_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and all that are in it, each once, by name."""
    return _walked(module, "", set())


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module, also of those in it, each once."""
    return [parameter for _, parameter in named_parameters(module)]


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module, also of those in it, each once, by name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, one in modules_in(module):
        for name, parameter in own_parameters(one):
            found.setdefault(id(parameter), (joined(prefix, name), parameter))
    return list(found.values())


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module itself, by name."""
    return [
        (name, one) for name, one in held_by(module, "parameters") if one is not None
    ]


def own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers of a module itself, by name."""
    return [(name, one) for name, one in held_by(module, "buffers") if one is not None]


def joined(prefix: str, name: str) -> str:
    """The name of what a part of a module has."""
    return f"{prefix}.{name}" if prefix else name


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm with statistics of several rows.

    One that was scripted has another class.
    """
    return isinstance(module, NormBase) or any(
        name == _STATISTICS for name, _ in own_buffers(module)
    )


def rate_of_dropout(layer: nn.Module) -> float:
    """How much a layer drops; 0 if the program has put no number there.

    It may have put a layer of its own there.
    """
    return (
        number_of(attribute(layer, "p" if isinstance(layer, Dropout) else "dropout"))
        or 0.0
    )


def owners_of(parameter: torch.Tensor) -> list[nn.Module]:
    """The modules that have a parameter, also in a module of theirs."""
    return [
        module
        for module in living_modules()
        if any(own is parameter for own in parameters_in(module))
    ]


def longest_names(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """The name of each in the largest module that has it, by id.

    Those that no module has are left out.
    """
    wanted = {id(parameter) for parameter in parameters}
    names: dict[int, str] = {}
    for module in living_modules():
        for name, parameter in named_parameters(module):
            if id(parameter) in wanted:
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
    return names


def names_of(parameters: Sequence[torch.Tensor]) -> list[str]:
    """The name of each in what the program wrapped; else its shape."""
    names = longest_names(parameters)
    return [
        names.get(id(one), "").removeprefix(WRAPPER) or nameless(one.shape)
        for one in parameters
    ]


def nameless(shape: Sequence[int]) -> str:
    """What to call a parameter that no module has: `a parameter of 4x8`."""
    return f"a parameter of {'x'.join(map(str, shape)) or '1'}"


def _walked(
    module: nn.Module, prefix: str, passed: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in passed:
        return
    passed.add(id(module))
    yield prefix, module
    for name, child in held_by(module, "modules"):
        if isinstance(child, nn.Module):
            yield from _walked(child, joined(prefix, name), passed)
