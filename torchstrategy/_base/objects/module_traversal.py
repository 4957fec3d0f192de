"""The parts of a module: children, and modules and tensors in plain attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchstrategy._base.objects.attribute_contents import things_in
from torchstrategy._base.types import Device


def modules_within(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and everything below them, each once, parents before their children.

    Modules that a module holds in a container or object are included, unlike in
    `Module.modules()`.
    """
    found: dict[int, nn.Module] = {}
    waiting = list(modules)
    for module in waiting:  # the loop appends to this list
        if id(module) not in found:
            found[id(module)] = module
            waiting.extend(module.children())
            waiting.extend(
                value
                for _, value in held_plainly(module)
                if isinstance(value, nn.Module)
            )
    return list(found.values())


def roots_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of some modules that are children of no other one of them."""
    children = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in children]


def held_plainly(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What is in the plain attributes of a module and its tensors.

    This is modules, tensors and other things, each with its path.
    """
    for name, value in plain_attributes(module).items():
        yield from things_in(f".{name}", value)
    for name, tensor in tensors_with_attributes(module):
        for key, value in vars(tensor).items():
            yield from things_in(f".{name}.{key}", value)


def tensors_with_attributes(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers on which a program has set attributes, by name."""
    tables = vars(module)["_parameters"], vars(module)["_buffers"]
    named = [pair for table in tables if table for pair in table.items()]
    return [
        (name, tensor) for name, tensor in named if tensor is not None and vars(tensor)
    ]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's own."""
    return {
        name: value for name, value in vars(module).items() if name not in TORCHS_OWN
    }


def move(module: nn.Module, device: Device) -> nn.Module:
    """Moves a module to a device.

    Its tensors keep the attributes that a program has set on them.

    torch makes new tensors for buffers, and would leave these attributes behind.
    """
    marked = [
        (part, *pair)
        for part in module.modules()
        for pair in tensors_with_attributes(part)
    ]
    moved = module.to(device)
    for part, name, before in marked:
        after = part._buffers.get(name)
        if after is not None and after is not before:
            vars(after).update(vars(before))
    return moved


def computed_by_hooks(module: nn.Module) -> set[str]:
    """The plain attributes that a hook computes again before each forward.

    For example, the hooks of `weight_norm` and of pruning do so.

    They compute `weight` of parameters whose names begin with `weight_`.
    """
    hooks = module._forward_pre_hooks.values()
    names = (
        getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks
    )
    return {
        str(name)
        for name in names
        if any(known.startswith(f"{name}_") for known in module._parameters)
    }


def tables_of(
    insides: Sequence[dict[str, Any]],
) -> dict[tuple[int, str], dict[Any, Any]]:
    """The tables of modules, by the position of the module and the table's name.

    You pass the `__dict__`s of the modules.
    """
    tables = ("_parameters", "_modules", "_buffers", *HOOK_TABLES)
    return {
        (i, table): inside[table]
        for i, inside in enumerate(insides)
        for table in tables
    }


HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
# The attributes in which torch itself keeps tables, hooks, flags, and the result of
# `module.compile()`.
TORCHS_OWN = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
# The tables among torch's own attributes that hold more than a flag.
TABLES = TORCHS_OWN - {"training", "_is_full_backward_hook"}
