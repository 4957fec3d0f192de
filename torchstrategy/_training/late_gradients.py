"""Gradients of a backward that runs between two runs, through results of a run: they go on to the user's parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import final

import torch

from torchstrategy._communication.transfer import added
from torchstrategy._core.torch_internals import (
    has_gradient_hooks,
    on_gradient,
    raw_grad,
    set_raw_grad,
    take_raw_grads,
    will_be_reached,
)
from torchstrategy._training.replica_gradients import ReplicaParameter

Owner = Callable[[], torch.Tensor | None]
"""Returns one of the user's parameters; None if nobody has it any more."""


def deliver_late(owners: Sequence[Owner], parameters: Sequence[Sequence[ReplicaParameter]]) -> None:
    """From here on, the gradients of a backward between runs go on from the replicas' parameters to the user's at once.

    Args:
        owners: The user's parameters.
        parameters: For each replica its own parameters, in the order of the user's.
    """
    late: dict[int, list[ReplicaParameter]] = {}
    for local in parameters:
        for index, parameter in enumerate(local):
            if parameter.requires_grad and not parameter.delivers:
                late.setdefault(index, []).append(parameter)
    for index, of_all_replicas in late.items():
        delivery = _Delivery(owners[index], of_all_replicas)
        for parameter in of_all_replicas:
            parameter.delivers = True
            on_gradient(parameter, delivery.arrived)


# Autograd runs the backward of each accelerator on a thread of its own, so several gradients may come at once.
_delivering = threading.RLock()


@final
class _Delivery:
    """Delivers the gradients of all replicas' copies of one parameter to the user's own parameter.

    The hooks of the copies refer to this object, and it refers to the copies weakly: a cycle would keep their memory.
    """

    def __init__(self, owner: Callable[[], torch.Tensor | None], parameters: Sequence[ReplicaParameter]) -> None:
        self._owner = owner
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    def arrived(self, parameter: torch.Tensor) -> None:
        """Adds the gradients to the user's as they are: the loss of this backward already combines the replicas."""
        assert isinstance(parameter, ReplicaParameter)
        # During a run gradients stay local: see Note [The states of a gradient].
        if parameter.run.gradients is not None:
            return
        with _delivering:
            owner, parameters = self._owner(), [parameter]
            if owner is not None and has_gradient_hooks(owner):
                # The user's hooks see the sum of all replicas, once in each backward: the gradients wait until this
                # backward has reached the last of the copies.
                parameters = [known for reference in self._parameters if (known := reference()) is not None]
                if any(raw_grad(known) is None and will_be_reached(known) for known in parameters):
                    return
            gradients = [gradient for gradient in take_raw_grads(parameters) if gradient is not None]
            if owner is not None:
                _deliver(owner, gradients)


def _deliver(owner: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    gradient = added(gradients, owner.device) if len(gradients) > 1 else gradients[0].to(owner.device)
    before = raw_grad(owner)
    if has_gradient_hooks(owner):
        torch.autograd.backward([owner], [gradient], create_graph=torch.is_grad_enabled())
    else:
        set_raw_grad(owner, gradient if before is None else before + gradient)
