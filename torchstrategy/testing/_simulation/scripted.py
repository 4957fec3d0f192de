"""Modules of TorchScript, whose parameters are in C++."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Lets such a module move to a simulated device.

    `Module.to` does `parameter.data = ...`, which gives the Python object of a
    parameter another tensor in C++ if that is on a device of another type; see
    `tensors`. The module would keep the tensor of before.
    """
    modules: Any = torch.jit
    scripted = modules.RecursiveScriptModule
    scripted._apply = _exchanging_parameters(scripted._apply)


def _exchanging_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def exchanging(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
        future = torch.__future__
        before = future.get_overwrite_module_params_on_conversion()
        future.set_overwrite_module_params_on_conversion(True)
        try:
            return apply(self, fn, recurse)
        finally:
            future.set_overwrite_module_params_on_conversion(before)

    return exchanging
