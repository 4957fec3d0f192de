"""A replica's parameter as a part of the user's own graph, which begins at the user's own parameter.

A replica's parameter is a leaf. That is right for a step that runs its own backward, and has to be undone for one whose
results the user differentiates: whoever asks there for the gradient of the user's parameter, `backward`,
`torch.autograd.grad`, a hook, a second derivative, has to find it in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from torchstrategy._context import current_frame, is_default
from torchstrategy._ledger import LocalParameter
from torchstrategy._torch import set_slot, slot


@final
class LinkedParameter(nn.Parameter):
    """A replica's parameter with a history: it has the same memory, and what is done to it is done to that."""

    local: LocalParameter

    @property
    def grad(self) -> torch.Tensor | None:
        return self.local.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.local.grad = value

    @property
    def data(self) -> torch.Tensor:
        return self.local.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.local.data = value


def linked(local: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """What stands in the replica for its parameter `local`, so that gradients flow on to `owner`."""
    if not isinstance(local, LocalParameter) or not local.requires_grad:
        return local
    parameter = _link(owner, [local])
    parameter.__class__ = LinkedParameter  # torch itself makes parameters without a history only
    assert isinstance(parameter, LinkedParameter)
    parameter.local = local
    return parameter


def is_in_replica() -> bool:
    """Whether this thread is that of a replica, and not the user's."""
    frame = current_frame()
    return frame is not None and frame.replica_context is not None and not is_default(frame.strategy)


class _Link(torch.autograd.Function):
    """The memory of one parameter, with the history of another."""

    @staticmethod
    def forward(ctx: Any, owner: torch.Tensor, local: list[LocalParameter]) -> torch.Tensor:
        (parameter,) = local  # in a list, so that it is no input of the graph
        ctx.device, ctx.local = owner.device, parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not is_in_replica():
            return gradient.to(ctx.device), None
        before = slot(ctx.local)  # a forward that runs a backward: its gradients are collected as those of a step
        set_slot(ctx.local, gradient if before is None else before + gradient)
        return None, None


_link: Callable[[torch.Tensor, list[LocalParameter]], torch.Tensor] = _Link.apply
