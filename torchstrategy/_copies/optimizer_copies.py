"""Copies of the user's optimizers, for replicas that have parameters of their own.

The user's own optimizer updates the user's own parameters, whose memory the replicas on
that device share. Each replica on another device has a copy of the optimizer, with a
state of its own. After each step of the user's optimizer, the copy takes the same step
on the same gradients. So all replicas have bitwise the same parameters, and no
parameter is sent.

An optimizer that draws random numbers, or looks at more than gradients, could come to
other bits. So only torch's own optimizers have copies. After a step of any other
optimizer, the new values of the parameters are sent.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from torchstrategy._base.context import without_autograd
from torchstrategy._base.marks import mark_of
from torchstrategy._base.objects.changes import are_same
from torchstrategy._base.objects.proxies import is_torchs, parameters_of, plain_class
from torchstrategy._base.objects.torch_hooks import others_are_told
from torchstrategy._base.torch_internals import raw_grad, raw_grads
from torchstrategy._base.trace import traced
from torchstrategy._base.writes import TrackedTensors
from torchstrategy._copies.gradients.replica_gradients import ReplicaParameter
from torchstrategy._copies.replica_steppers import settings_of
from torchstrategy._group.transfer import copy_to

# Returns the copy of an accumulated gradient that is on the device of a replica
# already, or None.
Arrived = Callable[[torch.Tensor, int], torch.Tensor | None]


def can_have_copies(optimizer: Optimizer) -> bool:
    """Whether a copy that is given the same gradients takes the same step."""
    if not is_torchs(optimizer) or isinstance(optimizer, LBFGS):
        return False
    inside = vars(optimizer)
    has_hooks = (
        inside["_optimizer_step_pre_hooks"]
        or inside["_optimizer_step_post_hooks"]
        or others_are_told()
    )
    # A fused optimizer divides gradients by the scale of a GradScaler, which tells it
    # to the user's optimizer only.
    return not has_hooks and not any(
        group.get("fused") for group in inside["param_groups"]
    )


@final
class OptimizerCopies:
    """The copies of one optimizer.

    Args:
        optimizer: The user's own.
        local: For each replica that has parameters with memory of their own: these, by
            the ids of the user's.
    """

    def __init__(
        self, optimizer: Optimizer, local: Mapping[int, Mapping[int, ReplicaParameter]]
    ) -> None:
        self.of_replicas = {
            replica: _Copy(optimizer, parameters)
            for replica, parameters in local.items()
        }
        # The state of the user's optimizer that the copies agree with.
        self._known: list[Any] = []
        self._tensors = TrackedTensors([])  # those in it
        # The marks of the gradients with which the user's optimizer begins its step.
        self._gradients: list[tuple[int, int]] = []
        # Replicas on several devices run at the same time, and each may ask for the
        # state of its copy.
        self._lock = threading.Lock()

    def state(self, optimizer: Optimizer, replica: int) -> dict[torch.Tensor, Any]:
        """The state of a replica's copy, by the replica's own parameters.

        Called on the replica's thread.
        """
        with self._lock, without_autograd():
            self.begin(optimizer)
            return self.of_replicas[replica].state()

    def begin(self, optimizer: Optimizer) -> None:
        """Before a step: brings the user's settings and state to the copies.

        They are those of the user's optimizer, if they changed.
        """
        # A state dict may have been loaded, or a state tensor written, since the copies
        # took their last step.
        has_news = self._note_state(optimizer)
        known, self._known = self._known, [_NOTHING]  # until all copies have it
        for copied in self.of_replicas.values():
            copied.bring(optimizer, with_state=has_news)
        self._known = known
        self._gradients = _mark_gradients(optimizer)

    def step(
        self, optimizer: Optimizer, owners: Sequence[torch.Tensor], arrived: Arrived
    ) -> bool:
        """After a step of the user's optimizer.

        The copies take the same step on the replicas' parameters.

        Args:
            optimizer: The user's own.
            owners: The user's parameters whose counterparts are updated.
            arrived: Returns the copy of a gradient that a replica has already.

        Returns:
            Whether they took it. They cannot if the gradients are no longer those that
            the user's optimizer began its step with: torch's loops for SGD with
            nesterov momentum write on gradients, and a closure makes new ones.
        """
        if _mark_gradients(optimizer) != self._gradients:
            return False
        gradients = [(owner, raw_grad(owner)) for owner in owners]
        for replica, copied in self.of_replicas.items():
            taken: list[_Gradient] = []
            for owner, gradient in gradients:
                if gradient is not None and id(owner) in copied.plain:
                    taken.append(
                        _Gradient(owner, gradient, here=arrived(gradient, replica))
                    )
            with traced("update [{}] [replica {}]", optimizer, replica):
                copied.step(taken)
        # The step itself has written it, and the copies have done the same to theirs.
        self._note_state(optimizer)
        return True

    def _note_state(self, optimizer: Optimizer) -> bool:
        """Says that the copies agree with the state that the optimizer has now.

        Returns whether it is a new one.
        """
        values = [
            value
            for state in vars(optimizer)["state"].values()
            for value in state.values()
        ]
        if are_same(values, self._known):
            return bool(self._tensors.take_changes().all)
        self._known = values
        self._tensors = TrackedTensors(
            value for value in values if isinstance(value, torch.Tensor)
        )
        self._tensors.watch()
        return True


_NOTHING = object()  # what no state has in it


class _Gradient(NamedTuple):
    """A gradient with which the copy of an optimizer takes a step."""

    owner: torch.Tensor  # the user's parameter
    gradient: torch.Tensor  # of the user's parameter
    # The copy of the gradient that is on the replica's device already.
    here: torch.Tensor | None


def _mark_gradients(optimizer: Optimizer) -> list[tuple[int, int]]:
    return list(map(mark_of, raw_grads(parameters_of(optimizer))))


@final
class _Copy:
    """The copy of an optimizer for one replica."""

    def __init__(
        self, optimizer: Optimizer, local: Mapping[int, ReplicaParameter]
    ) -> None:
        cls, inside = plain_class(type(optimizer)), vars(optimizer)
        self._local = local
        # The copy updates plain parameters over the same memory: for a subclass, such
        # as `ReplicaParameter`, torch chooses another loop, which rounds otherwise.
        owners = [owner for owner in parameters_of(optimizer) if id(owner) in local]
        self.plain = {
            id(owner): nn.Parameter(local[id(owner)].detach()) for owner in owners
        }
        groups: list[dict[str, Any]] = []
        for group in inside["param_groups"]:
            plain = [
                self.plain[id(owner)] for owner in group["params"] if id(owner) in local
            ]
            groups.append({**group, "params": plain})
        # Not by the constructor: those of torch's optimizers differ in their arguments.
        self._optimizer: Any = object.__new__(cls)
        state = {
            "defaults": dict(inside["defaults"]),
            "state": defaultdict(dict),
            "param_groups": groups,
        }
        self._optimizer.__setstate__(state)

    def state(self) -> dict[torch.Tensor, Any]:
        state = self._optimizer.state
        return {
            self._local[key]: state[plain]
            for key, plain in self.plain.items()
            if plain in state
        }

    def bring(self, optimizer: Optimizer, with_state: bool) -> None:
        """Brings the settings of the user's optimizer, and its state if asked."""
        for group, copied in zip(
            vars(optimizer)["param_groups"], self._optimizer.param_groups, strict=True
        ):
            copied.update(settings_of(group))
        if not with_state:
            return
        self._optimizer.state.clear()
        for owner, values in vars(optimizer)["state"].items():
            plain = self.plain.get(id(owner))
            if plain is not None:
                self._optimizer.state[plain] = {
                    name: _send(value, plain) for name, value in values.items()
                }

    def step(self, gradients: Sequence[_Gradient]) -> None:
        """Takes a step."""
        if not gradients:
            return
        trained = [self.plain[id(one.owner)] for one in gradients]
        for one, plain in zip(gradients, trained, strict=True):
            local = self._local[id(one.owner)]
            # The replica's parameter may have got other memory since the last step
            # (`ModuleReplica.bring_parameters`).
            if plain.data_ptr() != local.data_ptr() or plain.shape != local.shape:
                plain.data = local.detach()
        sent = iter(
            copy_to(
                [one.gradient for one in gradients if one.here is None],
                trained[0].device,
            )
        )
        for one, plain in zip(gradients, trained, strict=True):
            plain.grad = next(sent) if one.here is None else one.here
        try:
            self._optimizer.step()
        finally:
            # The gradients were lent for the step. To keep them would cost their memory
            # until the next one.
            for plain in trained:
                plain.grad = None


def _send(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    # Torch keeps some scalars of the state on the CPU, such as the number of steps.
    stays = value.is_cpu and value.dim() == 0
    return value.detach().to(value.device if stays else parameter.device, copy=True)
