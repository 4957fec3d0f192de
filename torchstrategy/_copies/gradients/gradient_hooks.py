"""How gradients of a replica reach the user's parameters and hooks.

These are the ways besides a reduction.

A replica's parameters have none of the user's hooks. Hooks of ours count how often
backward adds to them. So when gradients are reduced, the user's hooks see a gradient
that backward made, and none that a step assigned.

A gradient is late if a backward makes it between two runs, through results of a run. It
goes on to the user's parameter at once.

A replica's parameter is a leaf, which is right for a step that runs backward itself. If
the user differentiates the results of the step instead (`DataParallel`), the graph has
to reach the user's own parameter: `backward`, `torch.autograd.grad`, hooks and second
derivatives all look for it there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchstrategy._base import torch_internals
from torchstrategy._base.torch_internals import (
    have_gradient_hooks,
    on_gradient,
    raw_grad,
    set_raw_grad,
    take_raw_grads,
)
from torchstrategy._copies.gradients.replica_gradients import (
    CurrentRun,
    ReplicaGradients,
    ReplicaParameter,
    call_in_backward,
)
from torchstrategy._copies.gradients.user_gradients import can_hold
from torchstrategy._group.transfer import sum_on

# Returns one of the user's parameters; None if nobody has it any more.
Owner = Callable[[], torch.Tensor | None]


def count_additions(of_replicas: Sequence[ReplicaGradients], index: int) -> None:
    """From here on, counts how often backward adds to one gradient in each replica."""
    for of_replica in of_replicas:
        for parameter in of_replica.parameters[index : index + 1]:
            call_in_backward(parameter, _count_addition, _count_computation)


def send_through_hooks(
    owners: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Adds gradients to some of the user's parameters, and calls their hooks.

    One backward does the same.

    A hook may be for several parameters, and ask autograd which of them this backward
    reaches. As in the backward of a model, the last parameters get their gradients
    first.
    """
    # The step may have trained these.
    frozen = [owner for owner in owners if not owner.requires_grad]
    for owner in frozen:
        owner.requires_grad_()
    try:
        with torch.enable_grad():
            # autograd begins with the node that was made last.
            roots = [_link(owner, []) for owner in owners]
        # It runs on this thread, which is known to speak for all replicas; the threads
        # of autograd's own pool are not.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(roots, list(gradients))
    finally:
        for owner in frozen:
            owner.requires_grad_(False)


def find_seen_by_hooks(
    of_replicas: Sequence[ReplicaGradients],
    owners: Sequence[torch.Tensor],
    names: Sequence[str],
) -> set[int]:
    """The user's parameters, by position, whose hooks see what backward has added.

    No hook sees a gradient that a step assigned itself.

    Raises:
        RuntimeError: If a hook would see something else than in plain PyTorch; the
            parameter is named.
    """
    seen: set[int] = set()
    for of_replica in of_replicas:
        for index, times in of_replica.added.items():
            if not have_gradient_hooks((owners[index],)):
                continue
            if times > 1:
                raise RuntimeError(
                    f"{names[index]} has a gradient hook, and the step ran backward "
                    f"{times} times before gradients came together: the hook would see "
                    "only their sum. Remove it, or run one backward in each run."
                )
            seen.add(index)
        for index, times in of_replica.computed.items():
            # `torch.autograd.grad` computes a gradient of a parameter and adds it to no
            # slot.
            if times > of_replica.added[index] and owners[index]._backward_hooks:
                raise RuntimeError(
                    f"{names[index]} has a gradient hook, and the step differentiated "
                    "by torch.autograd.grad: in plain PyTorch the hook sees, and may "
                    "change, that gradient of the whole batch, and a replica has that "
                    "of its own rows. Remove the hook, or call backward() and use "
                    ".grad."
                )
        of_replica.added.clear()
        of_replica.computed.clear()
    return seen


def _count_computation(run: CurrentRun, index: int, gradient: torch.Tensor) -> None:
    if run.gradients is not None:
        run.gradients.computed[index] += 1


def _count_addition(parameter: torch.Tensor) -> None:
    assert isinstance(parameter, ReplicaParameter)
    state = parameter.torchstrategy_state
    if state.run.gradients is not None:
        state.run.gradients.added[state.position] += 1


def deliver_late(
    owners: Sequence[Owner], parameters: Sequence[Sequence[ReplicaParameter]]
) -> None:
    """From here on, passes on the gradients of a backward between runs at once.

    They go from the replicas' parameters to the user's.

    Args:
        owners: The user's parameters.
        parameters: For each replica its own parameters, in the order of the user's.
    """
    for owner, of_all_replicas in zip(
        owners, zip(*parameters, strict=True), strict=False
    ):
        late = [
            p
            for p in of_all_replicas
            if p.requires_grad and not p.torchstrategy_state.delivers
        ]
        if late:
            # Weakly: the hooks of the copies refer to this list, and a cycle would keep
            # their memory.
            copies = [weakref.ref(parameter) for parameter in late]
            for parameter in late:
                parameter.torchstrategy_state.delivers = True
                on_gradient(parameter, functools.partial(_deliver, owner, copies))


# Autograd runs the backward of each accelerator on a thread of its own, so several
# gradients may come at once.
_delivering = threading.RLock()


def _deliver(
    owned: Owner,
    copies: Sequence[weakref.ref[ReplicaParameter]],
    parameter: torch.Tensor,
) -> None:
    """Delivers a gradient to the user's parameter as it is.

    The loss of this backward already combines the replicas.

    Args:
        owned: The user's parameter.
        copies: That of each replica.
        parameter: The one of them that has got a gradient.
    """
    assert isinstance(parameter, ReplicaParameter)
    # During a run gradients stay local: see Note [The states of a gradient].
    if parameter.torchstrategy_state.run.gradients is not None:
        return
    with _delivering:
        owner, parameters = owned(), [parameter]
        if owner is not None and have_gradient_hooks((owner,)):
            # The user's hooks see the sum of all replicas, once in each backward: the
            # gradients wait until this backward has reached the last of the copies.
            referred = [reference() for reference in copies]
            parameters = [known for known in referred if known is not None]
            if any(
                raw_grad(known) is None and torch_internals.will_be_reached(known)
                for known in parameters
            ):
                return
        gradients = [
            gradient for gradient in take_raw_grads(parameters) if gradient is not None
        ]
        if owner is None:
            return
        is_one = len(gradients) == 1
        gradient = (
            gradients[0].to(owner.device) if is_one else sum_on(gradients, owner.device)
        )
        before = raw_grad(owner)
        if have_gradient_hooks((owner,)):
            torch.autograd.backward(
                [owner], [gradient], create_graph=torch.is_grad_enabled()
            )
        elif (
            before is not None
            and not torch.is_grad_enabled()
            and can_hold(before, gradient)
        ):
            before.add_(gradient)  # in place, as autograd does it
        else:
            set_raw_grad(owner, gradient if before is None else before + gradient)


@contextmanager
def attach_to_graph(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[None]:
    """A block in which parameters of a replica have a history.

    So gradients flow on to the user's parameters.

    The parameters stay the same Python objects, wherever the step refers to them: in
    several modules, in a dict, in a closure.

    Args:
        pairs: Tensors of a replica, each with the user's own.
    """
    attached = []
    try:
        for local, owner in pairs:
            if isinstance(local, ReplicaParameter) and local.requires_grad:
                # In the block, the leaf to which a backward in it adds gradients.
                leaf: list[torch.Tensor] = [local]
                other = _link(owner, leaf)
                attached.append((local, other, leaf))
                # The Python object stays and gets the tensor with a history: a copy of
                # the parameter would have to be put into every module, dict and closure
                # that refers to the parameter.
                torch_internals.swap_tensors(local, other)
                leaf[:] = [other]
                _collect_in(local, other)
        yield
    finally:
        for local, other, leaf in attached:
            # The node of the graph refers to this list. Once the two have changed back,
            # the tensor in the list has that node as its `grad_fn`: a cycle. An empty
            # list also tells the node that the block has ended.
            leaf.clear()
            if not local.is_leaf:
                torch_internals.swap_tensors(local, other)
                _collect_in(local, local)


def _collect_in(local: ReplicaParameter, leaf: torch.Tensor) -> None:
    """From here on, the parameter `local` has its local gradient in `leaf`'s slot."""
    state = local.torchstrategy_state
    if state.run.gradients is not None:
        slots: list[Any] = state.run.gradients.parameters
        slots[state.position] = leaf


class _Link(torch.autograd.Function):
    """Makes a tensor with a replica's parameter's memory and the user's history.

    Without a replica's parameter, it is a node from which a gradient, also a sparse
    one, goes on to the user's.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: torch.Tensor, leaf: list[torch.Tensor]
    ) -> torch.Tensor:
        # The replica's parameter comes in a list, so that autograd does not take it for
        # an input of this function.
        ctx.device, ctx.leaf = owner.device, leaf
        return (leaf[0] if leaf else owner).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.leaf:
            return gradient.to(ctx.device), None
        # This backward runs within the block, in the user's forward: its gradients stay
        # in the replica, as those of a step do, and are reduced when the run ends.
        (leaf,) = ctx.leaf
        before = raw_grad(leaf)
        set_raw_grad(leaf, gradient if before is None else before + gradient)
        return None, None


_link: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = _Link.apply
