"""What tests of variables share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchstrategy
from topologies import central, central_with_copies, compute_devices
from torchstrategy import Variable, VariableAggregation, VariableSynchronization

NONE, SUM, MEAN, FIRST = VariableAggregation
AUTO, NO_SYNC, ON_WRITE, ON_READ = VariableSynchronization


def mirrored(replicas: int) -> torchstrategy.Strategy:
    return torchstrategy.MirroredStrategy(compute_devices(replicas))


def one_device(replicas: int = 1) -> torchstrategy.Strategy:
    return torchstrategy.OneDeviceStrategy(compute_devices(1)[0])


MAKERS: dict[str, tuple[Callable[[int], torchstrategy.Strategy], int]] = {
    "default": (lambda replicas: torchstrategy.get_strategy(), 1),
    "one_device": (one_device, 1),
    "central_1": (central, 1),
    "copies_1": (central_with_copies, 1),
    "mirrored_1": (mirrored, 1),
    "central_2": (central, 2),
    "copies_3": (central_with_copies, 3),
    "mirrored_2": (mirrored, 2),
    "mirrored_4": (mirrored, 4),
}


def make(name: str) -> torchstrategy.Strategy:
    maker, replicas = MAKERS[name]
    return maker(replicas)


def has_components(strategy: torchstrategy.Strategy) -> bool:
    return (
        len(strategy.extended.parameter_devices) > 1
        if torchstrategy.get_strategy() is not strategy
        else False
    )


def made(strategy: torchstrategy.Strategy, *args: Any, **kwargs: Any) -> Variable:
    with strategy.scope():
        return Variable(*args, **kwargs)


def components(strategy: torchstrategy.Strategy, v: Variable) -> list[Any]:
    return [
        component.read_value().tolist()
        for component in strategy.experimental_local_results(v)
    ]


def numbers(strategy: torchstrategy.Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What each replica computes, as numbers."""
    return list(
        strategy.experimental_local_results(strategy.run(lambda: fn().tolist()))
    )


def silently(fn: Callable[[], Any]) -> Callable[[], None]:
    def step() -> None:
        fn()

    return step


class Scaled(nn.Module):
    """A module that holds variables in all the ways that modules hold parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.scale = Variable(torch.tensor(2.0, dtype=torch.float64), name="scale")
        self.biases = [Variable(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
        self.frozen = Variable(torch.ones(2, dtype=torch.float64), trainable=False)
        self.steps = Variable(0, aggregation=FIRST)
        self.rows = Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.tanh(self.linear(x) * self.scale + self.biases[0]) * self.frozen
            + self.biases[1]
        )

    def trained(self) -> list[torch.Tensor]:
        return [*self.linear.parameters(), self.scale, *self.biases]


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda trained: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
    "adam": lambda trained: torch.optim.Adam(
        [{"params": trained[:3], "lr": 0.05}, {"params": trained[3:]}]
    ),
    "rmsprop": lambda trained: torch.optim.RMSprop(trained, lr=0.01),
}


def silently_with(fn: Callable[[Any], Any]) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        fn(batch)

    return step
