"""Where parameters live: what every storage offers to a strategy, and the one of a single replica.

A storage takes in what is created in the strategy's scope, and lends it to each run.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrategy._creation import Counter, watched
from torchstrategy._parts import parts_of
from torchstrategy._replica import Replica, Watch
from torchstrategy._shares import Shares
from torchstrategy._types import Device
from torchstrategy._variables import Variable, is_variable

CrossReplica = Callable[[], AbstractContextManager[None]]
"""Enters the strategy's cross-replica context."""


Step = tuple[Callable[..., Any], Sequence[Any]]
"""What is run, and the leaves of its arguments."""


class Loan(ABC):
    """The parameters as one run has them: from when it begins until it ends or fails."""

    watch: Watch | None = None
    """What looks on while the replicas run."""

    @abstractmethod
    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        """What the user's objects are in `replica`, by their id. Called on its thread, when the step begins there."""

    @abstractmethod
    def ends(self, replica: Replica) -> None:
        """Called on the thread of `replica`, when the step has ended there."""

    @abstractmethod
    def published(self) -> AbstractContextManager[None]:
        """For the length of the block, the user's own parameters have the gradients of the run so far."""

    @abstractmethod
    def results_require_grad(self) -> None:
        """The caller may run a backward through the results: its gradients have to reach the user's parameters."""

    def warn(self) -> None:  # noqa: B027  a lone replica does what plain PyTorch does
        """After the run: warns of what may not be the numbers of one device."""


class Storage(ABC):
    """Where parameters live.

    Args:
        devices: The device of each replica.
        parameter_device: Where parameters are.
    """

    def __init__(self, devices: Sequence[Device], parameter_device: Device) -> None:
        self.devices = tuple(devices)
        self.parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """Where parameters are: the one device, or all that have them."""
        return (self.parameter_device,)

    def watching(self) -> AbstractContextManager[None]:
        """For the length of the block, takes in what this thread creates."""
        return watched(self.take_part, self.claim, self.take_optimizer, self.take_counter)

    def take_module(self, module: nn.Module) -> None:
        """Takes in a module, and all below it.

        Raises:
            RuntimeError: If a part of it belongs to another strategy.
            TypeError: If it cannot be used in replicas.
        """
        parts = parts_of([module])
        for part in parts:
            self.claim(part)
            for parameter in part.parameters(recurse=False):
                self.claim(parameter)
        for part in parts:
            self.take_part(part)

    def claim(self, thing: nn.Module | torch.Tensor) -> None:
        """Notes that a module or parameter belongs here.

        Raises:
            RuntimeError: If it belongs to another strategy.
        """
        owner = _owners.get(thing)
        if owner is not None and owner() not in (None, self):
            raise RuntimeError(
                f"This {type(thing).__name__} already belongs to another strategy, in whose scope it was created. A "
                "module belongs to one strategy: create another one, or copy.deepcopy it outside of any scope."
            )
        if owner is None:
            _owners[thing] = weakref.ref(self)

    def owns(self, thing: nn.Module | torch.Tensor) -> bool:
        """Whether a module or parameter belongs here."""
        owner = _owners.get(thing)
        return owner is not None and owner() is self

    @abstractmethod
    def like(self) -> Storage:
        """An empty storage of the same kind on the same devices."""

    @abstractmethod
    def take_part(self, module: nn.Module) -> None:
        """Takes in one module; it may have been taken in before, and gained a part since."""

    @abstractmethod
    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Takes in an optimizer."""

    def take_variable(self, variable: Variable) -> None:
        """Takes in a variable."""
        self.claim(variable)

    @abstractmethod
    def take_counter(self, counter: Counter) -> None:
        """Takes in a learning-rate scheduler or a `GradScaler`."""

    @abstractmethod
    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> AbstractContextManager[Loan]:
        """The parameters for one run. Leaving the block ends it; leaving it by an exception means that it failed.

        Args:
            shares: How much each replica counts.
            step: What is run, with the leaves of its arguments.
            cross_replica: Enters the cross-replica context.
        """


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # modules and parameters -> a weak reference to their storage


def is_nobodys(thing: nn.Module | torch.Tensor) -> bool:
    """Whether a module or parameter belongs to no strategy; a variable belongs to one for ever."""
    owner = _owners.get(thing)
    return owner is None or (owner() is None and not is_variable(thing))


@final
class InPlaceStorage(Storage):
    """The one replica uses the user's own modules."""

    def like(self) -> Storage:
        return InPlaceStorage(self.devices, self.parameter_device)

    def take_part(self, module: nn.Module) -> None:
        self.claim(module)

    def take_optimizer(self, optimizer: Optimizer) -> None:
        pass  # the replica uses it as it is

    def take_counter(self, counter: Counter) -> None:
        pass  # the one replica counts each step once

    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> AbstractContextManager[Loan]:
        return _IN_PLACE


@final
class _InPlaceLoan(Loan):
    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        return {}

    def ends(self, replica: Replica) -> None:
        pass

    def published(self) -> AbstractContextManager[None]:
        return nullcontext()

    def results_require_grad(self) -> None:
        pass  # their graph ends in the user's own parameters


_IN_PLACE: AbstractContextManager[Loan] = nullcontext(_InPlaceLoan())
