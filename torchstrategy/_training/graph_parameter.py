"""A replica's parameter as a part of the user's own graph, which begins at the user's own parameter.

A replica's parameter is a leaf. That is right for a step that runs its own backward, and has to be undone for one whose
results the user differentiates: whoever asks there for the gradient of the user's parameter, `backward`,
`torch.autograd.grad`, a hook, a second derivative, has to find it in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from torchstrategy._core.context import current_frame, is_default
from torchstrategy._core.torch_internals import raw_grad, set_raw_grad, swap_tensors
from torchstrategy._training.replica_gradients import ReplicaParameter


@contextmanager
def attach_to_graph(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """A block in which parameters of a replica have a history, so that gradients flow on to their owners.

    They are the same objects as before, wherever the step has them: in several modules, in a dict, in a closure.

    Args:
        pairs: Tensors of a replica, each with the user's own.
    """
    links: list[_Linked] = []
    try:
        for local, owner in pairs:
            if isinstance(local, ReplicaParameter) and local.requires_grad:
                leaf: list[torch.Tensor] = [local]
                links.append(_Linked(local, _link(owner, leaf), leaf))
                links[-1].begin()
        yield
    finally:
        for link in links:
            link.end()


def is_in_replica() -> bool:
    """Whether this thread is that of a replica, and not the user's."""
    frame = current_frame()
    return frame is not None and frame.replica_context is not None and not is_default(frame.strategy)


@final
class _Linked(NamedTuple):
    """A parameter, and the tensor with which it exchanges what they are for the length of a block."""

    local: ReplicaParameter
    other: torch.Tensor
    leaf: list[torch.Tensor]  # where the link finds what collects the gradients of a backward in the block

    def begin(self) -> None:
        swap_tensors(self.local, self.other)
        self.leaf[:] = [self.other]
        self._collects(self.other)

    def end(self) -> None:
        self.leaf.clear()  # it would be a circle: the other tensor is what the link has made
        if not self.local.is_leaf:
            swap_tensors(self.local, self.other)
            self._collects(self.local)

    def _collects(self, leaf: torch.Tensor) -> None:
        """Says where the replica's own gradient lies."""
        gradients: Any = self.local.run.gradients
        if gradients is not None:
            gradients.parameters[self.local.position] = leaf


class _Link(torch.autograd.Function):
    """The memory of one parameter, with the history of another."""

    @staticmethod
    def forward(ctx: Any, owner: torch.Tensor, leaf: list[torch.Tensor]) -> torch.Tensor:
        ctx.device, ctx.leaf = owner.device, leaf  # in a list, so that it is no input of the graph
        return leaf[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.leaf:
            return gradient.to(ctx.device), None
        (leaf,) = ctx.leaf  # a forward that runs a backward: its gradients are collected as those of a step
        before = raw_grad(leaf)
        set_raw_grad(leaf, gradient if before is None else before + gradient)
        return None, None


_link: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = _Link.apply
