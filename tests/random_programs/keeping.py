"""Hooks that keep what they see outside of the model, and how a step reads it.

There are functions for that.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import torchstrategy

Read = Callable[[], Any]  # returns what a hook saw last, or None


class Keeper:
    """An object with a hook."""

    def __init__(self) -> None:
        self.last: Any = None
        self.seen: dict[str, Any] = {}
        self.was_called = False

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        """Keeps the output."""
        # No count: replicas with one row more may call a module once more.
        self.was_called = True
        self.last = output
        self.seen["last"] = output

    __call__ = hook


def _attribute(module: nn.Module) -> Read:
    keeper = Keeper()
    module.register_forward_hook(keeper.hook)
    return lambda: keeper.last


def _called(module: nn.Module) -> Read:
    keeper = Keeper()
    module.register_forward_hook(keeper)
    return lambda: keeper.seen.get("last")


def _dict(module: nn.Module) -> Read:
    kept: dict[str, Any] = {}
    module.register_forward_hook(lambda module, args, output: kept.update(last=output))
    return lambda: kept.get("last")


def _by_module(module: nn.Module) -> Read:
    kept: dict[Any, Any] = {}

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept[module] = output

    module.register_forward_hook(hook)
    return lambda: next(iter(kept.values()), None)


def _list(module: nn.Module) -> Read:
    # What replicas append to an empty list are items for all: this one is rewritten.
    kept: list[Any] = [None]
    module.register_forward_pre_hook(lambda module, args: kept.clear())
    module.register_forward_hook(lambda module, args, output: kept.append(output))
    return lambda: kept[-1] if kept else None


def _append(kept: Any, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    kept.append(output)


def _deque(module: nn.Module) -> Read:
    kept: Any = collections.deque(maxlen=1)
    module.register_forward_hook(partial(_append, kept))
    return lambda: kept[0] if kept else None


def _list_of_lists(module: nn.Module) -> Read:
    kept: list[list[Any]] = [[], [None]]

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept[1][:] = [output]

    module.register_forward_hook(hook)
    return lambda: kept[1][-1]


def _variable(module: nn.Module) -> Read:
    kept = None

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal kept
        kept = output

    module.register_forward_hook(hook)
    return lambda: kept


def _namespace(module: nn.Module) -> Read:
    kept = types.SimpleNamespace(last=None, keeper=Keeper())

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.last = kept.keeper.last = output

    module.register_forward_hook(hook)
    return lambda: kept.last if kept.last is kept.keeper.last else None


KEEPERS: dict[str, Callable[[nn.Module], Read]] = {
    "attribute": _attribute,
    "called": _called,
    "dict": _dict,
    "by module": _by_module,
    "list": _list,
    "deque": _deque,
    "list of lists": _list_of_lists,
    "variable": _variable,
    "namespace": _namespace,
}


def read_of(module: nn.Module) -> list[Read]:
    """Takes from a model's modules the functions that read what their hooks keep."""
    return [
        vars(part).pop("kept_read")
        for part in module.modules()
        if "kept_read" in vars(part)
    ]


def kept_rows(reads: list[Read], outputs: torch.Tensor) -> torch.Tensor:
    """A number for each row of some outputs: mean squares of what hooks saw of it."""
    rows = torch.zeros(len(outputs), dtype=outputs.dtype, device=outputs.device)
    for read in reads:
        kept = read()
        # Outside of the replicas of a DataParallel, what they have kept is where they
        # run.
        if isinstance(kept, torchstrategy.PerReplica):
            kept = torch.cat([part.to(outputs.device) for part in kept.values])
        if kept is not None and len(kept) == len(outputs):
            rows = rows + kept.to(outputs.device).square().mean(1)
    return rows
