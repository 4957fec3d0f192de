"""A proxy acts as the user's object, also when the run ends meanwhile.

A thread may be in one of its methods then.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchstrategy._base.objects import proxies


class Trainer:
    def __init__(self) -> None:
        self.epochs = 3


class Momentum(torch.optim.SGD):
    def zero_momentum(self) -> str:
        return "zeroed"


def linear() -> nn.Linear:
    return nn.Linear(2, 1)


def momentum() -> Momentum:
    return Momentum([nn.Parameter(torch.ones(1))], lr=0.1)


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(momentum(), step_size=2)


def marked_parameter() -> nn.Parameter:
    parameter: Any = nn.Parameter(torch.ones(2))
    parameter.decays = False
    return parameter


def set_new(thing: Any) -> int:
    thing.is_new = 1
    return thing.is_new


def set_and_delete(thing: Any) -> bool:
    vars(thing)["gone"] = 1
    del thing.gone
    return hasattr(thing, "gone")


def load_own_state(optimizer: Any) -> int:
    optimizer.load_state_dict(optimizer.state_dict())
    return len(optimizer.param_groups)


USES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "read a module": (linear, lambda module: module.in_features, 2),
    "set on a module": (linear, set_new, 1),
    "delete on a module": (linear, set_and_delete, False),
    "zero gradients": (momentum, lambda optimizer: optimizer.zero_grad(), None),
    "load a state": (momentum, load_own_state, 1),
    "call a method of the user's": (
        momentum,
        lambda optimizer: optimizer.zero_momentum(),
        "zeroed",
    ),
    "read a scheduler": (scheduler, lambda one: one.step.__name__, "step"),
    "read a parameter": (marked_parameter, lambda parameter: parameter.decays, False),
    "read a field of a parameter": (
        marked_parameter,
        lambda parameter: parameter.requires_grad,
        True,
    ),
    "set on a parameter": (marked_parameter, set_new, 1),
    "delete on a parameter": (marked_parameter, set_and_delete, False),
    "read a trainer": (Trainer, lambda trainer: trainer.epochs, 3),
    "set on a trainer": (Trainer, set_new, 1),
    "delete on a trainer": (Trainer, set_and_delete, False),
    "copy a trainer": (Trainer, lambda trainer: copy.copy(trainer).epochs, 3),
    "pickle a trainer": (
        Trainer,
        lambda trainer: pickle.loads(pickle.dumps(trainer)).epochs,
        3,
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_run_may_end_in_the_middle_of_an_access(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads ran one model through `DataParallel`, and `super()` failed.

    In a proxy's method it raised `TypeError`.

    A run on another thread had ended between the beginning of `__getattribute__` and
    its `super()`, and the parameter had its own class again. Here this happens at each
    place where a method of a proxy asks for the replica's object.
    """
    make, access, expected = USES[use]
    thing, run = make(), object()
    number_of_calls = 0

    def end_run_at(last: int) -> Callable[[object], object]:
        def find(asked: object) -> object:
            nonlocal number_of_calls
            if asked is thing:
                number_of_calls += 1
                if number_of_calls == last:
                    proxies.uninstall([thing], run)
            return asked

        return find

    last = 0
    # The access has come to the place at which the run ended.
    while number_of_calls >= last:
        last, number_of_calls = last + 1, 0
        proxies.install([thing], run)
        monkeypatch.setattr(proxies, "local_object", end_run_at(last))
        try:
            assert access(thing) == expected
        finally:
            monkeypatch.undo()
            proxies.uninstall([thing], run)
    assert last > 1  # some access asks at all
    assert type(thing) is type(make())
