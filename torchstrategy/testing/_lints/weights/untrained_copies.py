"""Models that ranks train together, and copies of their parts.

Nobody trains these copies, such as averages and teachers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from torchstrategy.testing._lints.evidence.facts import Model
from torchstrategy.testing._lints.evidence.fingerprints import Fingerprint, fingerprint
from torchstrategy.testing._lints.evidence.known import Known, is_plain
from torchstrategy.testing._lints.evidence.modules import (
    modules_in,
    named_parameters,
    owners_of,
    parameters_in,
)
from torchstrategy.testing._lints.evidence.places import Place
from torchstrategy.testing._lints.torch_internals import NormBase, ignored_names

# Of a part: smaller ones, as a single layer, look alike without being copies.
_FEWEST_MATRICES = 2
_MOST_SEARCHES = 64  # through all objects of Python

Prints = dict[str, Fingerprint | None]
Signature = tuple[tuple[str, tuple[int, ...]], ...]


@final
@dataclass(eq=False)
class Trained:
    """A model that ranks train together, on one rank.

    Attributes:
        key: The same for its copies in all ranks.
        ranks: Who has copies.
        is_wrapped: Whether `DistributedDataParallel` has it; if not, the program
            reduces its gradients.
        has_own_buffers: Whether nobody gives the others the buffers of one rank.
        parts: The names of its parts, by the names and shapes of their parameters.
        begun: What its parameters were after it was wrapped.
        ignored: The names of what it leaves alone.
        copies: How many copies of each part have been called.
    """

    key: tuple[Any, ...]
    ranks: tuple[int, ...]
    is_wrapped: bool
    has_own_buffers: bool
    parts: dict[Signature, str] = field(default_factory=dict)
    begun: Prints = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    copies: Counter[str] = field(default_factory=Counter)


@final
@dataclass(eq=False)
class Called:
    """A module that a rank calls: a trained model, or an untrained copy of a part.

    Attributes:
        module: It, while it is there.
        trained: The model that it is, or of which it is a copy.
        part: Of which part it is a copy; None if it is the model itself.
        number: Which of the copies of this part, in the order of their first calls.
        entries: The ids of the parameters of its first layer, which gets the rows.
        counts: In how many periods between steps it was called without gradients, by
            way.
        last: The last of these, by way.
        trains: In which period it was last called with gradients.
        is_trained: Whether a copy was called with parameters that get gradients: it is
            trained by itself then.
        first: What it was at the first look.
        has_moved: Whether its parameters have been changed in place, and by more than a
            loaded checkpoint.
    """

    module: weakref.ref[nn.Module]
    trained: Trained
    part: str | None
    number: int
    entries: frozenset[int]
    counts: Counter[tuple[Place, ...]] = field(default_factory=Counter)
    last: dict[tuple[Place, ...], int] = field(default_factory=dict)
    trains: int = -1
    is_trained: bool = False
    first: Prints | None = None
    has_moved: bool = False

    def prints(self) -> Prints:
        """What is to be the same on all ranks, by name."""
        module = self.module()
        if module is None:
            return {}
        compared = dict(self._parameters(module))
        if self.part is None and self.trained.has_own_buffers:
            # If not, the others get those of rank 0 at their next call through the
            # wrapper.
            compared |= _statistics(module)
        return {
            name: fingerprint(tensor)
            for name, tensor in compared.items()
            if name not in self.trained.ignored
        }

    def begun(self) -> Prints:
        """What its parameters would be if it were a copy of a wrapped model.

        The copy was made after the model was wrapped.
        """
        return {
            name: value
            for name, value in self.trained.begun.items()
            if name.startswith(self._prefix())
        }

    def _parameters(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named_parameters(module):
            yield self._prefix() + name, parameter

    def _prefix(self) -> str:
        return f"{self.part}." if self.part else ""


@final
class CalledModules:
    """Finds what a rank calls, by one of its parameters."""

    def __init__(self) -> None:
        self._trained: list[Trained] = []
        self._known: Known[list[Called]] = Known()  # an empty list: something else
        self._searches = 0

    def __bool__(self) -> bool:
        return bool(self._trained)

    def add(self, model: Model) -> None:
        """Adds a model that was wrapped."""
        wrapped = model.model()
        if wrapped is None or len(model.ranks) < 2:
            return
        parts: dict[Signature, str] = {}
        for name, module in modules_in(wrapped.module):
            signature = _signature(module)
            if sum(len(shape) > 1 for _, shape in signature) >= _FEWEST_MATRICES:
                parts.setdefault(signature, name)
        begun = {
            name: fingerprint(one) for name, one in named_parameters(wrapped.module)
        }
        has_own_buffers = not wrapped.broadcast_buffers
        trained = Trained(
            model.key,
            model.ranks,
            True,
            has_own_buffers,
            parts,
            begun,
            ignored_names(wrapped),
        )
        self._trained.append(trained)
        self._note(wrapped.module, trained, None)

    def add_owner(self, parameter: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Adds the largest module that has a parameter.

        The program reduces the gradient of the parameter itself.
        """
        owner = max(owners_of(parameter), key=_number_of_parameters, default=None)
        if owner is not None and len(ranks) > 1:
            key = (
                "reduced",
                ranks,
                sum(not trained.is_wrapped for trained in self._trained),
            )
            trained = Trained(key, ranks, False, True)
            self._trained.append(trained)
            self._note(owner, trained, None)

    def of(self, parameter: nn.Parameter) -> Called | None:
        """The module that has a parameter; None if it is neither of the two kinds."""
        if not is_plain(parameter):
            return None
        known = self._known.get(parameter)
        if known is None:
            known = self._search(parameter)
        return known[0] if known else None

    def _search(self, parameter: nn.Parameter) -> list[Called]:
        nothing: list[Called] = []
        self._known.put(parameter, nothing)
        if self._searches >= _MOST_SEARCHES:
            return nothing
        self._searches += 1
        owners = owners_of(parameter)
        is_averaged = any(isinstance(one, AveragedModel) for one in owners)
        owners.sort(key=_number_of_parameters, reverse=True)
        for owner in owners:
            for trained in self._trained:
                part = trained.parts.get(_signature(owner))
                if part is not None and (
                    is_averaged
                    or not any(own.requires_grad for own in parameters_in(owner))
                ):
                    return self._note(owner, trained, part)
        for own in parameters_in(owners[0]) if owners else ():
            self._known.put(own, nothing)
        return nothing

    def _note(
        self, module: nn.Module, trained: Trained, part: str | None
    ) -> list[Called]:
        named = named_parameters(module)
        layer = named[0][0].rpartition(".")[0] if named else ""
        entries = frozenset(
            id(one) for name, one in named if name.rpartition(".")[0] == layer
        )
        number = 0
        if part is not None:
            number = trained.copies[part]
            trained.copies[part] += 1
        called = [Called(weakref.ref(module), trained, part, number, entries)]
        for _, parameter in named:
            self._known.put(parameter, called)
        return called


def _number_of_parameters(module: nn.Module) -> int:
    return len(parameters_in(module))


def _signature(module: nn.Module) -> Signature:
    named = named_parameters(module)
    if any(is_lazy(parameter) for _, parameter in named):  # they have no shape so far
        return ()
    return tuple((name, tuple(parameter.shape)) for name, parameter in named)


def _statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """The statistics of norms in evaluation mode, which they normalize with."""
    found: dict[str, Any] = {}
    for prefix, layer in modules_in(module):
        if (
            isinstance(layer, NormBase)
            and not layer.training
            and layer.running_mean is not None
        ):
            before = f"{prefix}." if prefix else ""
            found |= {
                f"{before}running_mean": layer.running_mean,
                f"{before}running_var": layer.running_var,
            }
    return found
