"""What the user's program calls a tensor."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from torchstrategy._base.torch_internals import unseen_by_function_modes
from torchstrategy.testing._ranks.lines import is_the_users

_MOST_FRAMES = 4  # functions of the user that call each other
_MOST_ENTRIES = 64  # of a dict or a module, which is searched at each collective


def names_of(tensor: torch.Tensor) -> frozenset[str]:
    """The names that running functions of the user have for a tensor.

    It also looks at the names in their modules.
    """
    names: set[str] = set()
    frame, left = inspect.currentframe(), _MOST_FRAMES
    with unseen_by_function_modes():
        while frame is not None and left:
            if is_the_users(frame):
                left -= 1
                for found in _scopes(frame):
                    names.update(_names_in(found, tensor))
            frame = frame.f_back
    return frozenset(names)


def _scopes(frame: FrameType) -> list[Mapping[str, Any]]:
    here, around = frame.f_locals, frame.f_globals
    return [here] if here is around else [here, around]


def _names_in(scope: Mapping[str, Any], tensor: torch.Tensor) -> Iterator[str]:
    for name, value in list(scope.items()):
        if value is tensor:
            yield name
        elif type(value) is dict and len(value) <= _MOST_ENTRIES:
            yield from (
                f"{name}[{key!r}]"
                for key, entry in value.items()
                if entry is tensor and type(key) is str
            )
        # A stand-in for one may say that it is one.
        elif issubclass(type(value), torch.nn.Module):
            yield from _names_in_module(name, value, tensor)


def _names_in_module(
    owner: str, module: torch.nn.Module, tensor: torch.Tensor
) -> Iterator[str]:
    for place, (name, parameter) in enumerate(module.named_parameters()):
        if place == _MOST_ENTRIES:
            return
        if parameter is tensor:
            yield f"{owner}.{name}"
        elif parameter.is_leaf and parameter.grad is tensor:
            yield f"{owner}.{name}.grad"
