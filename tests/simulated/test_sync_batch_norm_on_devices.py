"""Replicas that share a device meet in backward.

Torch runs it on a thread of the device unless told otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from problems import assert_close, deal, gradients, where_it_is
from torchstrategy.nn import SyncBatchNorm, compute_average_loss
from torchstrategy.testing import record_streams
from torchstrategy.testing._simulation.torch_internals import ENGINE

HERE, THERE, OWNER = (torch.device("sim", index) for index in (1, 2, 3))
DEVICES = {
    "two share one": [HERE, HERE],
    "three share one": [HERE] * 3,
    "some share": [HERE, THERE, HERE, THERE],
    "none share": [HERE, THERE],
}


@pytest.fixture
def torchs_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward as torch runs it on an accelerator.

    It knows the first simulated device only.
    """
    owner, name = ENGINE
    engine: Any = getattr(owner, name)
    monkeypatch.setattr(owner, name, engine._engine)


class Noted(torch.autograd.Function):
    """Says on which thread its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threads: list[int]) -> torch.Tensor:
        ctx.threads = threads
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.threads.append(threading.get_ident())
        return gradient * 2, None


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 2),
        nn.BatchNorm1d(2),
    ).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return compute_average_loss(((model(x) - 0.3) ** 3).sum(1), x[:, 0].sigmoid())


def check(
    strategy: torchstrategy.Strategy, step: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    with strategy.scope():
        model = SyncBatchNorm.convert_sync_batchnorm(net())
    plain = net()
    x = torch.randn(
        7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    strategy.run(lambda b: step(model, b), args=(deal(strategy, x),))
    step(plain, where_it_is(plain, [x])[0])
    # That of the first bias is zero.
    assert_close(gradients(model), gradients(plain), "gradient", 1e-12, 1e-13)


@pytest.mark.parametrize("where", DEVICES)
def test_replicas_that_share_a_device_meet_in_backward(where: str) -> None:
    strategy = torchstrategy.CentralStorageStrategy(DEVICES[where], OWNER)
    with record_streams():
        check(strategy, lambda model, x: loss_of(model, x).backward())


def test_torch_runs_backward_on_a_thread_of_the_device(torchs_engine: None) -> None:
    threads: list[int] = []
    x = torch.ones(2, device="sim:0", requires_grad=True)
    Noted.apply(x, threads).sum().backward()
    assert threads != [threading.get_ident()]


def test_in_a_replica_torch_runs_backward_on_the_thread_of_the_step(
    torchs_engine: None,
) -> None:
    strategy = torchstrategy.CentralStorageStrategy(["sim:0", "sim:0"], "cpu")

    def step(model: nn.Module, x: torch.Tensor) -> None:
        threads: list[int] = []
        loss = loss_of(model, Noted.apply(x.detach().requires_grad_(), threads))
        loss.backward()
        if torchstrategy.has_strategy():
            assert threads == [threading.get_ident()]

    check(strategy, step)


def test_a_step_that_turns_the_devices_threads_on_is_told_and_does_not_hang(
    torchs_engine: None,
) -> None:
    strategy = torchstrategy.CentralStorageStrategy(["sim:0", "sim:0"], "cpu")

    def step(model: nn.Module, x: torch.Tensor) -> None:
        with torch.autograd.set_multithreading_enabled(True):
            loss_of(model, x).backward()

    with pytest.raises(RuntimeError, match="on another thread than that of its step"):
        check(strategy, step)
