"""What the replicas of one run at a time have of the user's modules and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._gradients import Gradients
from torchstrategy._mirrors import Mirrors
from torchstrategy._types import Device


@final
class Copies:
    """What the replicas of one run at a time have of the user's modules and optimizers.

    Args:
        roots: The user's modules.
        optimizers: The user's optimizers.
        devices: The device of each replica.
        parameter_device: Where the modules are.
        may_alias: See `CentralStorage`.
        averages_buffers: See `CentralStorage`.
        generation: Of the set of modules that they are copies of.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        devices: Sequence[Device],
        parameter_device: Device,
        may_alias: bool,
        averages_buffers: bool,
        generation: int,
    ) -> None:
        self.generation = generation
        self._num_replicas = len(devices)
        with undisturbed():
            self.mirrors = Mirrors(roots, devices, parameter_device, may_alias, averages_buffers)
        self._index_of = {id(owner): index for index, owner in enumerate(self.mirrors.owners)}
        self._take_optimizers(optimizers)

    def bring_up_to_date(self, optimizers: Sequence[Optimizer]) -> bool:
        """Brings what the user wrote on the originals to the copies. False if they have to be made anew."""
        with undisturbed():
            if not self.mirrors.refresh():
                return False
        if _signature(optimizers) != self._optimizer_signature:
            self._take_optimizers(optimizers)
        return True

    def originals(self) -> list[object]:
        """What stand-ins are needed for."""
        plain = [owner for owner in self.mirrors.owners if isinstance(owner, nn.Parameter)]
        return [*self.mirrors.originals(), *self.optimizers(), *plain]

    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._optimizer_signature = _signature(optimizers)
        loose = {id(p): (name, p) for o in optimizers for name, p in _named(o) if id(p) not in self._index_of}
        self.gradients = Gradients(
            [*self.mirrors.owners, *(p for _, p in loose.values())],
            [*self.mirrors.names, *(f"{name}, a tensor of shape {tuple(p.shape)}," for name, p in loose.values())],
            [self.mirrors.parameters(r) for r in range(self._num_replicas)],
        )
        indices = {id(owner): index for index, owner in enumerate(self.gradients.owners)}
        self.optimized = {id(o): {id(p): indices[id(p)] for p in parameters_of(o)} for o in optimizers}
        self.known = indices.keys()


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block whose tensors are ordinary ones, and whose operations no graph records, whatever the caller wears."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that it updates, in order."""
    return [parameter for group in vars(optimizer)["param_groups"] for parameter in group["params"]]


def _signature(optimizers: Sequence[Optimizer]) -> list[tuple[int, list[int]]]:
    return [(id(o), [len(group["params"]) for group in vars(o)["param_groups"]]) for o in optimizers]


def _named(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(vars(optimizer)["param_groups"]):
        for j, parameter in enumerate(group["params"]):
            yield f"{type(optimizer).__name__}.param_groups[{i}]['params'][{j}]", parameter
