"""Where parameters live, and to which strategy each module, variable and parameter belongs.

A storage takes in the modules, variables and optimizers that are created in the strategy's scope.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrategy._binding.module_traversal import parts_of
from torchstrategy._binding.torch_hooks import Stepper, watched
from torchstrategy._core.types import Device
from torchstrategy._variables.variable import Variable, is_variable


class Storage:
    """Where parameters live.

    This storage is that of a single replica, which uses the user's own objects, so that a run has nothing to prepare.

    Args:
        devices: The device of each replica.
        parameter_device: Where parameters are.
    """

    def __init__(self, devices: Sequence[Device], parameter_device: Device) -> None:
        self.devices = tuple(devices)
        self.parameter_device = parameter_device
        # Where parameters are: one device, or every device that has copies of them.
        self.parameter_devices: tuple[Device, ...] = (parameter_device,)

    def watching(self) -> AbstractContextManager[None]:
        """For the length of the block, takes in the modules, optimizers and schedulers that this thread creates."""
        return watched(self._take, self.claim_parameter)

    def _take(self, thing: nn.Module | Optimizer | Stepper) -> None:
        if isinstance(thing, nn.Module):
            self.take_part(thing)
        else:
            self.take_stepper(thing)

    def take_module(self, module: nn.Module) -> None:
        """Takes in a module, and all modules below it.

        Raises:
            RuntimeError: If a part of it belongs to another strategy.
            TypeError: If it cannot be used in replicas.
        """
        parts = parts_of([module])
        # All parts are looked at first: a module that is refused leaves none of its parts claimed.
        for part in parts:
            self._require_free(part)
            for parameter in part.parameters(recurse=False):
                self._require_free(parameter)
        for part in parts:
            self.take_part(part)
            for parameter in part.parameters(recurse=False):
                self.claim_parameter(part, parameter)

    def claim(self, thing: nn.Module | Variable) -> None:
        """Notes that a module or variable belongs here.

        Raises:
            RuntimeError: If it belongs to another strategy.
        """
        self._require_free(thing)
        _owners.setdefault(thing, weakref.ref(self))

    def claim_parameter(self, module: nn.Module, parameter: torch.Tensor) -> None:
        """Notes that a parameter belongs here, for as long as a module has it.

        Raises:
            RuntimeError: If it belongs to another strategy.
        """
        self._require_free(parameter)
        if not is_variable(parameter):
            holder = weakref.ref(module, functools.partial(_forget, id(parameter)))
            _holders.setdefault(id(parameter), []).append((holder, weakref.ref(self)))

    def _require_free(self, thing: nn.Module | torch.Tensor) -> None:
        if _owner_of(thing) not in (None, self):
            raise RuntimeError(
                f"This {type(thing).__name__} already belongs to another strategy, in whose scope it was created. A "
                "module belongs to one strategy: create another one, or copy.deepcopy it outside of any scope."
            )

    def owns(self, thing: nn.Module | torch.Tensor) -> bool:
        """Whether a module or parameter belongs here."""
        return _owner_now(thing) is self

    def like(self) -> Storage:
        """An empty storage of the same kind on the same devices."""
        return Storage(self.devices, self.parameter_device)

    def take_part(self, module: nn.Module) -> None:
        """Takes in one module. It may have been taken in before, and have got another child since."""
        self.claim(module)

    def take_variable(self, variable: Variable) -> None:
        """Takes in a variable."""
        self.claim(variable)

    def take_stepper(self, stepper: Optimizer | Stepper) -> None:
        """Takes in an optimizer, a learning-rate scheduler or a `GradScaler`. A single replica uses it as it is."""


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # modules and variables -> a weak reference to their storage
# By the id of a parameter, the modules that were given it, and the storages that it belongs to. There is no reference
# to the parameter itself: torch refuses to swap a tensor that has a weak one.
_holders: dict[int, list[tuple[weakref.ref[nn.Module], weakref.ref[Storage]]]] = {}


def _forget(key: int, module: weakref.ref[nn.Module]) -> None:
    """Called when a module that had a parameter is gone, by Python's garbage collector, on any thread."""
    others = [pair for pair in _holders.pop(key, []) if pair[0] is not module]
    if others:
        _holders[key] = others


def _owner_of(thing: nn.Module | torch.Tensor) -> Storage | None:
    """The storage that a module or parameter belongs to."""
    if isinstance(thing, torch.Tensor) and not is_variable(thing):
        for holder, owner in _holders.get(id(thing), []):
            module = holder()
            if module is not None and any(parameter is thing for parameter in module._parameters.values()):
                return owner()
        return None
    known: weakref.ref[Storage] | None = _owners.get(thing)
    return None if known is None else known()


def _owner_now(thing: nn.Module | torch.Tensor) -> Storage | None:
    """The storage that a module or parameter belongs to, also if no hook has told of the parameter."""
    # `load_state_dict(assign=True)` puts parameters into modules without `register_parameter`, which has hooks.
    owner = _owner_of(thing)
    if owner is None and isinstance(thing, torch.Tensor) and not is_variable(thing):
        for module, reference in list(_owners.items()):
            if isinstance(module, nn.Module) and any(part is thing for part in module._parameters.values()):
                found: Storage | None = reference()
                return found
    return owner


def is_nobodys(thing: nn.Module | torch.Tensor) -> bool:
    """Whether a module or parameter belongs to no strategy; a variable belongs to one for ever."""
    return _owner_now(thing) is None and not (is_variable(thing) and thing in _owners)
