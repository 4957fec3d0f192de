"""What all replicas have of the user's modules and optimizers, for one run at a time."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._binding.proxies import users_own
from torchstrategy._core.context import undisturbed
from torchstrategy._core.devices import memory_device
from torchstrategy._core.types import Device
from torchstrategy._replication.replicated_modules import ReplicatedModules
from torchstrategy._training.all_reduced_gradients import AllReduce
from torchstrategy._training.gradient_reducer import GradientReducer
from torchstrategy._training.optimizer_copies import OptimizerCopies, can_have_copies, parameters_of
from torchstrategy._variables.variable import Variable, is_variable


class Placement(NamedTuple):
    """Where copies are, and how they are kept in step."""

    devices: Sequence[Device]  # of each replica
    parameter_device: Device
    may_alias: Sequence[bool]  # of each replica: whether parameters on the user's device share the user's memory
    averages_buffers: bool
    is_mirrored: bool  # whether replicas on other devices update their parameters themselves
    all_reduce: AllReduce | None  # adds up gradients and leaves the sums on all devices


@final
class ReplicaSet:
    """What all replicas have of the user's modules and optimizers, for one run at a time.

    Args:
        roots: The user's modules that are part of no other.
        variables: The user's variables.
        optimizers: The user's optimizers.
        layout: Where the copies are, and how they are kept in step.
        generation: A number that the storage counts up when the user's set of modules changes.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        variables: Sequence[Variable],
        optimizers: Sequence[Optimizer],
        layout: Placement,
        generation: int,
    ) -> None:
        self.generation = generation
        self.thread = 0  # the thread that called the run which has this set
        self._layout = layout
        self._num_replicas = len(layout.devices)
        with undisturbed():
            self.replicated = ReplicatedModules(
                roots, layout.devices, layout.parameter_device, layout.may_alias, layout.averages_buffers, variables
            )
        owners = self.replicated.owners
        self._index_of = {id(owner): index for index, owner in enumerate(owners)}
        # A variable needs no proxy: it asks by itself which replica it is in.
        self.plain_owners = [o for o in owners if isinstance(o, nn.Parameter) and not is_variable(o)]
        self._optimizer_copies: dict[int, OptimizerCopies] = {}
        self._take_optimizers(optimizers)

    def bring_up_to_date(self, optimizers: Sequence[Optimizer]) -> bool:
        """Brings what the user wrote on modules and optimizers to the copies. False if a new set has to be made."""
        with undisturbed():
            if not self.replicated.refresh():
                return False
        # The gradients of a set are those of the parameters of these optimizers, and their copies are made for these
        # parameters: after `add_param_group`, or where a parameter moved, both are made anew.
        if _signature(optimizers) != self._optimizer_signature or self.replicated.sharing() != self._sharing:
            self._take_optimizers(optimizers)
        return True

    def originals(self) -> list[object]:
        """The user's objects that become proxies during a run."""
        return [*self.replicated.originals(), *self.optimizers(), *self.plain_owners]

    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._optimizer_signature = _signature(optimizers)
        # Parameters that an optimizer has and no module, such as those of a layer that the user has removed. Replicas
        # have no copies of them, and may clear and read their gradients.
        loose = {id(p): (name, p) for o in optimizers for name, p in _named(o) if id(p) not in self._index_of}
        self.gradients = GradientReducer(
            [*self.replicated.owners, *(p for _, p in loose.values())],
            [*self.replicated.names, *(f"{name}, a tensor of shape {tuple(p.shape)}," for name, p in loose.values())],
            [self.replicated.parameters(r) for r in range(self._num_replicas)],
            # Replicas on one device run one at a time.
            len({memory_device(device) for device in self._layout.devices}) == 1,
            self._layout.all_reduce,
        )
        indices = {key: index for index, key in enumerate([*self._index_of, *loose])}
        self.optimized = {id(o): {id(p): indices[id(p)] for p in parameters_of(o)} for o in optimizers}
        self.known = indices.keys()
        self._sharing = self.replicated.sharing()
        local = {r: self.replicated.own_parameters(r) for r in range(self._num_replicas)}
        self._local = {r: parameters for r, parameters in local.items() if parameters}
        # The user's optimizer updates the first replica's parameters only if these share the memory of the user's.
        if self._layout.is_mirrored and self._local and all(self._sharing[0]):
            self._optimizer_copies = {id(o): OptimizerCopies(o, self._local) for o in optimizers if can_have_copies(o)}

    def own_state(self, optimizer: Optimizer, replica: int) -> Callable[[], dict[torch.Tensor, Any]] | None:
        """Returns a function for the state of a replica's copy of an optimizer; None if the replica has no copy."""
        copies = self._optimizer_copies.get(id(optimizer))
        return (
            functools.partial(copies.state, optimizer, replica) if copies is not None and copies.has(replica) else None
        )

    def begin_step(self, optimizer: Optimizer) -> None:
        """The user's optimizer is about to take a step: its copies get the settings and the state that it has now."""
        copies = self._optimizer_copies_of(optimizer)
        if copies is not None:
            with undisturbed():
                if _signature([optimizer])[0] not in self._optimizer_signature:
                    copies = self._optimizer_copies[id(optimizer)] = OptimizerCopies(optimizer, self._local)
                self.replicated.refresh_parameters()
                copies.begin(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """The user's optimizer has taken a step: its copies take the same step."""
        copies = self._optimizer_copies_of(optimizer)
        if copies is not None:
            owners = [parameter for parameter in parameters_of(optimizer) if id(parameter) in self._index_of]
            copies.step(optimizer, owners, self.gradients.arrived)
            self.replicated.note_updated(owners)

    def _optimizer_copies_of(self, optimizer: Optimizer) -> OptimizerCopies | None:
        copies = self._optimizer_copies.get(id(optimizer))
        # If parameters moved to other memory in this run, the copies would update the old memory. So values are sent
        # until the next run, which makes new copies.
        is_usable = copies is not None and can_have_copies(optimizer) and self.replicated.sharing() == self._sharing
        return copies if is_usable else None


def _signature(optimizers: Sequence[Optimizer]) -> list[tuple[int, list[list[int]]]]:
    return [(id(o), [list(map(id, group["params"])) for group in users_own(o, "param_groups")]) for o in optimizers]


def _named(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(users_own(optimizer, "param_groups")):
        for j, parameter in enumerate(group["params"]):
            yield f"{type(optimizer).__name__}.param_groups[{i}]['params'][{j}]", parameter
