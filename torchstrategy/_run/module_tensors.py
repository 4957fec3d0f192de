"""The parameters and buffers of modules, and the tensors that learn and are neither."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchstrategy._variables.kinds import SyncOnReadVariable
from torchstrategy._variables.variable import is_variable


def trainable_among(
    held: Iterable[tuple[str, Any]], parameters: Container[int]
) -> Iterator[str]:
    """Where a tensor is held that learns and is no parameter."""
    # Only leaves learn. A tensor with a history is an output that a forward, or the
    # function, has kept from earlier.
    for where, value in held:
        learns = (
            isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        )
        if learns and id(value) not in parameters:
            yield where


def tensors_in(
    modules: Sequence[nn.Module], table: str
) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors in the tables of this name, each once, by its place.

    A place is the position of a module, and a name in its table.
    """
    found: dict[int, tuple[tuple[int, str], torch.Tensor]] = {}
    for position, module in enumerate(modules):
        for name, tensor in module.__dict__[table].items():
            # A variable that is registered as a buffer is copied as a variable. A
            # `SyncOnReadVariable` is not copied: it holds a component for each replica
            # already.
            is_uncopied = is_variable(tensor) and (
                table == "_buffers" or type(tensor) is SyncOnReadVariable
            )
            if tensor is not None and not is_uncopied:
                found.setdefault(id(tensor), ((position, name), tensor))
    return dict(found.values())


def is_running(module: nn.Module, name: str) -> bool:
    """Whether a buffer is a running statistic of a normalisation layer."""
    # The base classes of torch's batch and instance normalisation layers have private
    # names. Layers of other packages follow torch in the names of such buffers.
    norms = (nn.BatchNorm1d.__mro__[1], nn.InstanceNorm1d.__mro__[1])
    is_statistic = isinstance(module, norms) or name in ("running_mean", "running_var")
    return is_statistic and vars(module)["_buffers"][name].is_floating_point()


def writes_unseen(module: nn.Module) -> bool:
    """Whether a layer writes running statistics, and nothing whose version changes.

    Such a layer does not count its batches.
    """
    is_norm = isinstance(module, nn.BatchNorm1d.__mro__[1])
    return is_norm and module.training and module.num_batches_tracked is None
