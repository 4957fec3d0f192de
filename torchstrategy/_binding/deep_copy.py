"""Deep copies in which an object that cannot be copied is the same object."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def deep_copied(value: Any, memo: Mapping[int, Any]) -> Any:
    """A copy made by `copy.deepcopy`, which shares with `value` each lock, file, generator or Python module in it.

    Args:
        value: The value to copy.
        memo: By the id of an object in the value, the object that the copy has in its place.

    Raises:
        Exception: Whatever the copy of a tensor, or of a module, raises.
    """
    shared: dict[int, Any] = {}
    while True:
        try:
            return copy.deepcopy(value, {**memo, **shared})
        except Exception as error:
            held = _failed_at(error)
            if id(held) in shared or isinstance(held, (torch.Tensor, nn.Module)):
                raise
            shared[id(held)] = held


def _failed_at(error: Exception) -> Any:
    """The innermost object that `copy.deepcopy` was copying when an error was raised."""
    code = copy.deepcopy.__code__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    return frames[-1].f_locals[code.co_varnames[0]]
