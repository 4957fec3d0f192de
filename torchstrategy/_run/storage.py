"""Where parameters live, and which strategy each object belongs to.

The objects are modules, variables and parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrategy._base.objects.module_traversal import modules_within
from torchstrategy._base.objects.torch_hooks import Stepper, watched
from torchstrategy._run.placement import Placement
from torchstrategy._variables.variable import Variable, is_variable


class Storage:
    """Where parameters live.

    This storage is that of a single replica, which uses the user's own objects, so that
    a run has nothing to prepare.

    Args:
        placement: Where parameters and their copies are.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.devices = tuple(placement.devices)
        self.parameter_device = placement.parameter_device
        # Where parameters are: one device, or every device that has copies of them.
        self.parameter_devices = (
            self.devices if placement.is_mirrored else (self.parameter_device,)
        )

    def watching(self) -> AbstractContextManager[None]:
        """A block that takes in the objects which this thread creates.

        The objects are modules, optimizers and schedulers.
        """
        return watched(self)

    def take_module(self, module: nn.Module) -> None:
        """Takes in a module, and all modules below it.

        Raises:
            RuntimeError: If a part of it belongs to another strategy.
            TypeError: If it cannot be used in replicas.
        """
        parts = modules_within([module])
        # All parts are looked at first: a module that is refused leaves none of its
        # parts claimed.
        for part in parts:
            self._require_free(part)
            for parameter in _own_parameters(part):
                self._require_free(parameter)
        for part in parts:
            self.take_part(part)
            for parameter in _own_parameters(part):
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
            holder = weakref.ref(
                module, functools.partial(_forget_holder, id(parameter))
            )
            _holders.setdefault(id(parameter), []).append((holder, weakref.ref(self)))

    def _require_free(self, thing: nn.Module | torch.Tensor) -> None:
        if _owner_of(thing) not in (None, self):
            if is_variable(thing):
                raise RuntimeError(
                    f"This {type(thing).__name__} already belongs to another strategy, "
                    "as its copies do. Create another one in the scope: "
                    "torchstrategy.Variable(variable.read_value())."
                )
            raise RuntimeError(
                f"This {type(thing).__name__} already belongs to another strategy, in "
                "whose scope it was created. A module belongs to one strategy: create "
                "another one, or copy.deepcopy it outside of any scope."
            )

    def owns(self, thing: nn.Module | torch.Tensor) -> bool:
        """Whether a module or parameter belongs here."""
        return _owner_of(thing, is_anywhere=True) is self

    def take_part(self, module: nn.Module) -> None:
        """Takes in one module.

        It may have been taken in before, and have got another child since.
        """
        self.claim(module)

    def take_variable(self, variable: Variable) -> None:
        """Takes in a variable."""
        self.claim(variable)

    def take_stepper(self, stepper: Optimizer | Stepper) -> None:
        """Takes in an optimizer, a learning-rate scheduler or a `GradScaler`.

        A single replica uses it as it is.
        """


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    # A class may give its method `parameters` another meaning.
    return [one for one in module._parameters.values() if one is not None]


# Modules and variables -> a weak reference to their storage.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
# By the id of a parameter, the modules that were given it, and the storages that it
# belongs to. There is no reference to the parameter itself: torch refuses to swap a
# tensor that has a weak one.
_holders: dict[int, list[tuple[weakref.ref[nn.Module], weakref.ref[Storage]]]] = {}


def _forget_holder(key: int, module: weakref.ref[nn.Module]) -> None:
    """Forgets a module that had a parameter, once the module is gone.

    Python's garbage collector calls it, on any thread.
    """
    others = [pair for pair in _holders.pop(key, []) if pair[0] is not module]
    if others:
        _holders[key] = others


def _owner_of(
    thing: nn.Module | torch.Tensor, is_anywhere: bool = False
) -> Storage | None:
    """The storage that a module or parameter belongs to.

    Args:
        thing: The module or parameter.
        is_anywhere: Whether a parameter is also looked for in modules that no hook has
            told of it. `load_state_dict(assign=True)` puts parameters into modules
            without `register_parameter`, which has hooks.
    """
    if not isinstance(thing, torch.Tensor) or is_variable(thing):
        known: weakref.ref[Storage] | None = _owners.get(thing)
        return None if known is None else known()

    def found(holders: Iterable[tuple[Any, weakref.ref[Storage]]]) -> Storage | None:
        for holder, owner in holders:
            if isinstance(holder, nn.Module) and any(
                part is thing for part in holder._parameters.values()
            ):
                storage = owner()
                if storage is not None:
                    return storage
        return None

    told = found((held(), owner) for held, owner in _holders.get(id(thing), []))
    return found(list(_owners.items())) if told is None and is_anywhere else told


def is_nobodys(thing: nn.Module | torch.Tensor) -> bool:
    """Whether a module or parameter belongs to no strategy.

    A variable always belongs to the strategy for which it was created.
    """
    return _owner_of(thing, is_anywhere=True) is None and not (
        is_variable(thing) and thing in _owners
    )
