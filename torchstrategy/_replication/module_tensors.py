"""The parameters and the buffers of the user's modules, each with its first place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from torchstrategy._binding.changes import TrackedTensor
from torchstrategy._variables.kinds import SyncOnReadVariable
from torchstrategy._variables.variable import is_variable


class BufferSlot(NamedTuple):
    """Where a buffer is: the position of a module, and the buffer's name there."""

    position: int
    name: str


def tensors_in(
    modules: Sequence[nn.Module], paths: dict[int, str], table: str
) -> list[tuple[BufferSlot, TrackedTensor]]:
    """The tensors in the tables of this name, each once, with its first place."""
    found: dict[int, tuple[BufferSlot, TrackedTensor]] = {}
    for position, module in enumerate(modules):
        for name, tensor in module.__dict__[table].items():
            # A variable that is registered as a buffer is copied as a variable. A `SyncOnReadVariable` is not copied:
            # it holds a component for each replica already.
            if is_variable(tensor) and (table == "_buffers" or type(tensor) is SyncOnReadVariable):
                continue
            if tensor is not None:
                is_running = table == "_buffers" and tensor.is_floating_point() and _is_statistic(module, name)
                tracked = TrackedTensor(f"{paths[id(module)]}.{name}", tensor, is_running)
                found.setdefault(id(tensor), (BufferSlot(position, name), tracked))
    return list(found.values())


def _is_statistic(module: nn.Module, name: str) -> bool:
    # The base classes of torch's batch and instance normalisation layers have private names. Layers of other packages
    # follow torch in the names of such buffers.
    norms = (nn.BatchNorm1d.__mro__[1], nn.InstanceNorm1d.__mro__[1])
    return isinstance(module, norms) or name in ("running_mean", "running_var")
