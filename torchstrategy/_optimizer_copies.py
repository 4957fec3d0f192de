"""Copies of the user's optimizers, with which replicas update parameters of their own.

The user's own optimizer updates the parameters of the first replica, which are the user's own. For each other replica
there is a copy of it, with a state of its own, that takes every step that the user's takes, after it, on the same
gradients. So all replicas come to the same bits, and no parameter is sent.

What decides by other things than gradients, or draws random numbers, could come to other bits: only torch's own
optimizers have copies. After a step of any other one, values are sent.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch.optim import LBFGS, Optimizer

from torchstrategy._comm import brought
from torchstrategy._ledger import LocalParameter
from torchstrategy._stand_ins import plain_class
from torchstrategy._torch import set_slot, slot, version


def can_have_copies(optimizer: Optimizer) -> bool:
    """Whether a copy that is given the same gradients takes the same step."""
    cls, inside = plain_class(type(optimizer)), vars(optimizer)
    has_hooks = inside["_optimizer_step_pre_hooks"] or inside["_optimizer_step_post_hooks"]
    is_torchs = cls.__module__.startswith("torch.optim.") and not issubclass(cls, LBFGS)
    # A fused one is told by a GradScaler, and by nobody else, what to divide gradients by.
    return is_torchs and not has_hooks and not any(group.get("fused") for group in inside["param_groups"])


@final
class OptimizerCopies:
    """The copies of one optimizer, for all replicas but the first.

    Args:
        optimizer: The user's own.
        local: The parameters of each of those replicas, by the id of the owner.
    """

    def __init__(self, optimizer: Optimizer, local: Sequence[Mapping[int, LocalParameter]]) -> None:
        self._local = list(local)
        self._copies = [_copy_of(optimizer, parameters) for parameters in local]
        self._known: list[tuple[torch.Tensor, int]] | None = None  # the state that the copies agree with

    def begin(self, optimizer: Optimizer) -> None:
        """Before a step: brings to the copies what was written on the settings and on the state."""
        for copied in self._copies:
            for group, own in zip(vars(optimizer)["param_groups"], copied.param_groups, strict=True):
                own.update({name: _settled(value) for name, value in group.items() if name != "params"})
        if self._known is None or not _same(self._known, list(_versions(optimizer))):
            for copied, parameters in zip(self._copies, self._local, strict=True):
                copied.state = defaultdict(dict, _state_for(optimizer, parameters))

    def step(self, optimizer: Optimizer) -> None:
        """After a step: the copies take the same."""
        for copied, parameters in zip(self._copies, self._local, strict=True):
            _step(copied, [(parameters[id(owner)], slot(owner)) for owner in _owners(optimizer, parameters)])
        self._known = list(_versions(optimizer))


def _copy_of(optimizer: Optimizer, parameters: Mapping[int, LocalParameter]) -> Any:
    cls, inside = plain_class(type(optimizer)), vars(optimizer)
    groups = [
        {**group, "params": [parameters[id(owner)] for owner in group["params"] if id(owner) in parameters]}
        for group in inside["param_groups"]
    ]
    copied: Any = object.__new__(cls)
    copied.__setstate__({"defaults": dict(inside["defaults"]), "state": defaultdict(dict), "param_groups": groups})
    return copied


def _owners(optimizer: Optimizer, parameters: Mapping[int, LocalParameter]) -> list[torch.Tensor]:
    groups = vars(optimizer)["param_groups"]
    return [owner for group in groups for owner in group["params"] if id(owner) in parameters]


def _step(copied: Optimizer, pairs: Sequence[tuple[LocalParameter, torch.Tensor | None]]) -> None:
    trained = [(local, gradient) for local, gradient in pairs if gradient is not None]
    if not trained:
        return
    gradients = brought([gradient for _, gradient in trained], trained[0][0].device)
    with ExitStack() as stack:
        ledger = trained[0][0].ledger
        if ledger is not None:
            stack.enter_context(ledger.resting())
        for (local, _), gradient in zip(trained, gradients, strict=True):
            stack.callback(set_slot, local, slot(local))
            set_slot(local, gradient)
        copied.step()


def _state_for(optimizer: Optimizer, parameters: Mapping[int, LocalParameter]) -> Iterator[tuple[torch.Tensor, Any]]:
    state = vars(optimizer)["state"]
    for owner in _owners(optimizer, parameters):
        if owner in state:
            local = parameters[id(owner)]
            yield local, {name: _copied(name, value, local) for name, value in state[owner].items()}


def _copied(name: str, value: Any, local: LocalParameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    # The number of steps, which torch keeps on the CPU.
    stays = name == "step" and value.device.type == "cpu"
    return value.detach().to(value.device if stays else local.device, copy=True)


def _settled(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _versions(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, int]]:
    for state in vars(optimizer)["state"].values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value, version(value)


def _same(known: Sequence[tuple[torch.Tensor, int]], now: Sequence[tuple[torch.Tensor, int]]) -> bool:
    return len(known) == len(now) and all(a is b and m == n for (a, m), (b, n) in zip(known, now, strict=True))
