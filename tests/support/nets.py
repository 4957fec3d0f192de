"""A model with something of everything, and how tests train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchstrategy
from problems import built, data, deal, mse, sgd

F64: dict[str, Any] = {"dtype": torch.float64}


class Net(nn.Module):
    """Something of everything that people put into a module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4, **F64), nn.Tanh(), nn.Dropout(0.0))
        self.blocks = nn.ModuleList([nn.Linear(4, 4, **F64) for _ in range(2)])
        self.heads = nn.ModuleDict(
            {"a": nn.Linear(4, 2, **F64), "b": nn.Linear(4, 2, **F64)}
        )
        self.scale = nn.Parameter(torch.ones(2, **F64))
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(2, **F64))])
        self.register_buffer("offset", torch.zeros(2, **F64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.head = "a"
        self.calls = 0
        self.forward_fn = self.decode
        self.all_blocks = [block for block in self.blocks]
        self.settings = {"gain": 1.0}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        for block in self.all_blocks:
            h = h + block(h).tanh()
        return h

    def decode(self, h: torch.Tensor) -> torch.Tensor:
        return (
            self.heads[self.head](h) * self.scale * self.settings["gain"]
            + self.shifts[0]
            + self.offset
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.forward_fn(self.encode(x))


def train(model: Any, optimizer: Any, batch: Any) -> None:
    """The step that most tests train by."""
    optimizer.zero_grad()
    mse(model, batch).backward()
    optimizer.step()


def trained(
    strategy: torchstrategy.Strategy, build: Callable[[], nn.Module] = Net
) -> tuple[Any, Any, Any, Any]:
    """A model that has been run, and its twin that plain PyTorch has trained."""
    (model, optimizer), (twin, plain) = built(strategy, build, sgd)
    for k in range(2):
        strategy.run(
            lambda b: train(model, optimizer, b),
            args=(deal(strategy, data(7, seed=k)),),
        )
        train(twin, plain, data(7, seed=k))
    return model, optimizer, twin, plain


def outputs(strategy: torchstrategy.Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What `fn` returns in each replica."""
    return list(strategy.experimental_local_results(strategy.run(fn)))
