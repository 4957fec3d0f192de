"""Whose memory a gradient lies in, how often it is held, and what is unwritten.

Replicas hold it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy
from problems import assert_close, built, data, deal, gradients, mlp, mse, sgd


class _Ones(torch.autograd.Function):
    """The sum of a parameter, with a gradient whose memory can be watched."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, memory: list[Any]) -> torch.Tensor:
        ctx.memory, ctx.shape = memory, parameter.shape
        return parameter.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ones = np.ones(ctx.shape, dtype=np.float32)
        ctx.memory.append(weakref.ref(ones))
        return torch.from_numpy(ones), None


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_replicas_that_take_turns_do_not_each_hold_gradients(where):
    """Four replicas of a model kept four gradients of it until they met.

    So memory grew with their number.
    """
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = sgd(model)
    memory: list[Any] = []
    held = []

    def step() -> None:
        held.append(sum(array() is not None for array in memory))
        _Ones.apply(model.weight, memory).backward()
        if where == "inside":
            optimizer.step()

    strategy.run(step)
    assert len(memory) == 4 and held == [0] * 4  # the total is held


class _Added(nn.Module):
    """Parameters that are added up: backward leaves gradients in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.rand(2, 3)),
            nn.Parameter(torch.rand(6)),
        )
        self.rows = nn.ParameterList([torch.rand(1, 3), torch.rand(1, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.first + self.second.view(2, 3) + torch.cat([*self.rows])).t()


def test_gradients_that_lie_in_one_piece_of_memory_are_weighed_once(make):
    strategy, batch = make(3), data(7)
    (model, _), (twin, _) = built(strategy, lambda: _Added().double(), None)
    strategy.run(
        lambda batch: mse(model, batch).backward(), args=(deal(strategy, batch),)
    )
    mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "once")


class _Constant(torch.autograd.Function):
    """A gradient that is always the same array."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, constant: Any) -> torch.Tensor:
        ctx.constant = constant
        return parameter.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.from_numpy(ctx.constant), None


def test_an_array_that_backward_returns_as_a_gradient_is_not_written():
    strategy, constant = (
        torchstrategy.CentralStorageStrategy(["cpu"] * 4),
        np.full((2, 3), 8.0, np.float32),
    )
    with strategy.scope():
        model = nn.Linear(3, 2)
    for _ in range(2):
        model.zero_grad()
        strategy.run(lambda: _Constant.apply(model.weight, constant).backward())
        assert bool((model.weight.grad == 8).all()) and bool((constant == 8).all())


class _Conjugated(nn.Module):
    """Backward leaves conjugated views as gradients, which fused loops do not write."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.second = nn.Parameter(torch.tensor([2 - 1j, 1 + 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first.conj() * self.second)


def test_gradients_that_are_conjugated_views_are_those_of_the_whole_batch():
    strategy, x = (
        torchstrategy.CentralStorageStrategy(["cpu"] * 3),
        torch.randn(6, 2, dtype=torch.complex64),
    )
    with strategy.scope():
        model = _Conjugated()
    twin = _Conjugated()
    strategy.run(lambda x: model(x).abs().mean().backward(), args=(deal(strategy, x),))
    twin(x).abs().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_tensor_that_a_step_puts_there_as_a_gradient_is_not_written(make):
    """The total of several replicas is made in the memory of the first gradient.

    It is where that is autograd's own.
    """
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    ones = [torch.ones_like(p) for p in model.parameters()]

    def step() -> None:
        for parameter, one in zip(model.parameters(), ones, strict=True):
            parameter.grad = one.to(parameter.device)

    strategy.run(step)
    assert all(bool((one == 1).all()) for one in ones)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
