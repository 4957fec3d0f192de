"""Gradients that come between runs, from a backward through results of a run: they go on to the user's parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import final

import torch

from torchstrategy._communication.transfer import added
from torchstrategy._core.torch_internals import (
    has_gradient_hooks,
    on_gradient,
    raw_grad,
    raw_grads,
    set_raw_grad,
    set_raw_grads,
    will_be_reached,
)
from torchstrategy._training.replica_gradients import ReplicaParameter

Owner = Callable[[], torch.Tensor | None]
"""Asks for a parameter of the user's; None: nobody has it any more."""


def deliver_late(owners: Sequence[Owner], parameters: Sequence[Sequence[ReplicaParameter]]) -> None:
    """From here on, what a backward between runs adds to the parameters of replicas goes on to their owners at once.

    Args:
        owners: The owners.
        parameters: Of each replica, its own, in the order of the owners.
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


_delivering = threading.RLock()  # the backward of several accelerators runs on a thread for each


@final
class _Delivery:
    """What a backward between runs adds to the replicas' parameters of one owner goes on to the owner.

    The parameters hold it, and it holds none of them: a cycle would keep their memory.
    """

    def __init__(self, owner: Callable[[], torch.Tensor | None], parameters: Sequence[ReplicaParameter]) -> None:
        self._owner = owner
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    def arrived(self, parameter: torch.Tensor) -> None:
        """Adds the gradients to the owner's, as they are: whoever ran the backward has weighed the replicas."""
        assert isinstance(parameter, ReplicaParameter)
        if parameter.run.gradients is not None:
            return
        with _delivering:
            owner, parameters = self._owner(), [parameter]
            if owner is not None and has_gradient_hooks(owner):
                # They see, in each backward, what all replicas have for it, once.
                parameters = [known for reference in self._parameters if (known := reference()) is not None]
                if any(raw_grad(known) is None and will_be_reached(known) for known in parameters):
                    return
            gradients = [gradient for gradient in raw_grads(parameters) if gradient is not None]
            set_raw_grads(parameters, repeat(None))
            if owner is not None:  # else nobody has it any more
                _deliver(owner, gradients)


def _deliver(owner: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    gradient = added(gradients, owner.device) if len(gradients) > 1 else gradients[0].to(owner.device)
    before = raw_grad(owner)
    if has_gradient_hooks(owner):
        torch.autograd.backward([owner], [gradient], create_graph=torch.is_grad_enabled())
    else:
        set_raw_grad(owner, gradient if before is None else before + gradient)
