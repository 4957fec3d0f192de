"""Deep copies of what users hold, in which what cannot be copied is the very same thing."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def deep_copied(value: Any, memo: Mapping[int, Any]) -> Any:
    """What `copy.deepcopy` makes of a value; a lock, a file, a generator or a Python module in it is the same in both.

    Args:
        value: What to copy.
        memo: By the id of what the value holds, what to put in its place.

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
    """The innermost thing that `copy.deepcopy` was copying when an error came."""
    code = copy.deepcopy.__code__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    return frames[-1].f_locals[code.co_varnames[0]]
