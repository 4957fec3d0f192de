"""A replica's parameter as a part of the user's own autograd graph, which begins at the user's own parameter.

A replica's parameter is a leaf, which is right for a step that runs backward itself. If the user differentiates the
results of the step instead (`DataParallel`), the graph has to reach the user's own parameter: `backward`,
`torch.autograd.grad`, hooks and second derivatives all look for it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchstrategy._core.torch_internals import raw_grad, set_raw_grad, swap_tensors
from torchstrategy._training.replica_gradients import ReplicaParameter


@contextmanager
def attach_to_graph(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """A block in which parameters of a replica have a history, so that gradients flow on to the user's parameters.

    The parameters stay the same Python objects, wherever the step refers to them: in several modules, in a dict, in a
    closure.

    Args:
        pairs: Tensors of a replica, each with the user's own.
    """
    with ExitStack() as stack:
        for local, owner in pairs:
            if isinstance(local, ReplicaParameter) and local.requires_grad:
                stack.enter_context(_attached(local, owner))
        yield


@contextmanager
def _attached(local: ReplicaParameter, owner: torch.Tensor) -> Iterator[None]:
    leaf: list[torch.Tensor] = [local]  # in the block it holds the leaf to which a backward in the block adds gradients
    other = _link(owner, leaf)
    try:
        # The Python object stays and gets the tensor with a history: a copy of the parameter would have to be put into
        # every module, dict and closure that refers to the parameter.
        swap_tensors(local, other)
        leaf[:] = [other]
        _collects(local, other)
        yield
    finally:
        # The node of the graph refers to this list. Once the two have changed back, the tensor in the list has that
        # node as its `grad_fn`: a cycle. An empty list also tells the node that the block has ended.
        leaf.clear()
        if not local.is_leaf:
            swap_tensors(local, other)
            _collects(local, local)


def _collects(local: ReplicaParameter, leaf: torch.Tensor) -> None:
    """Says in the slot of which tensor the replica's local gradient lies."""
    if local.run.gradients is not None:
        slots: list[Any] = local.run.gradients.parameters
        slots[local.position] = leaf


class _Link(torch.autograd.Function):
    """Makes a tensor with the memory of the replica's parameter and the history of the user's."""

    @staticmethod
    def forward(ctx: Any, owner: torch.Tensor, leaf: list[torch.Tensor]) -> torch.Tensor:
        # The replica's parameter comes in a list, so that autograd does not take it for an input of this function.
        ctx.device, ctx.leaf = owner.device, leaf
        return leaf[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.leaf:
            return gradient.to(ctx.device), None
        # This backward runs within the block, in the user's forward: its gradients stay in the replica, as those of a
        # step do, and are reduced when the run ends.
        (leaf,) = ctx.leaf
        before = raw_grad(leaf)
        set_raw_grad(leaf, gradient if before is None else before + gradient)
        return None, None


_link: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = _Link.apply
