"""Replicas that share one CPU, against the same pieces of the batch one after another by hand.

python benchmarks/replicas.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from contest import Contender, Row, Work, compared, hold, timed

WIDTH, ROWS, BAR = 64, 256, 1.05


def model(modules: int) -> nn.Sequential:
    """Linear layers and activations in turns."""
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(modules // 2) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def by_hand(modules: int, replicas: int, batch: tuple[torch.Tensor, torch.Tensor]) -> Work:
    """Plain PyTorch: each piece forward and backward, weighed, and one step of the optimizer."""
    net = model(modules)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(*(tensor.chunk(replicas) for tensor in batch), strict=True):
            (F.mse_loss(net(x), y) * (len(x) / ROWS)).backward()
        optimizer.step()

    return step


def in_replicas(strategy: torchstrategy.Strategy, modules: int, batch: tuple[torch.Tensor, torch.Tensor]) -> Work:
    """The whole step in each replica."""
    with strategy.scope():
        net = model(modules)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    dealt = next(iter(strategy.experimental_distribute_dataset([batch])))
    return lambda: strategy.run(step, args=(dealt,))


def outside(strategy: torchstrategy.Strategy, modules: int, batch: tuple[torch.Tensor, torch.Tensor]) -> Work:
    """Forward and backward in each replica, and the optimizer's step after the run."""
    with strategy.scope():
        net = model(modules)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def backward(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = batch
        F.mse_loss(net(x), y).backward()

    dealt = next(iter(strategy.experimental_distribute_dataset([batch])))

    def step() -> None:
        optimizer.zero_grad()
        strategy.run(backward, args=(dealt,))
        optimizer.step()

    return step


def same_batch(rounds: int, modules: int = 100) -> Iterator[Row]:
    """The same global batch over 2, 4 and 8 replicas."""
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for replicas in (2, 4, 8):
        devices = ["cpu"] * replicas
        central, mirrored = torchstrategy.CentralStorageStrategy(devices), torchstrategy.MirroredStrategy(devices)
        works = {
            "by hand": by_hand(modules, replicas, batch),
            "Central, the whole step": in_replicas(central, modules, batch),
            "Central, the optimizer outside": outside(central, modules, batch),
            "Mirrored, the whole step": in_replicas(mirrored, modules, batch),
            "Mirrored, the optimizer outside": outside(mirrored, modules, batch),
        }
        contenders = {
            name: Contender(timed(work, 5, time.process_time), () if name == "by hand" else ("by hand",), BAR)
            for name, work in works.items()
        }
        yield from compared(f"{replicas} replicas, {modules} modules", contenders, rounds)


CONTESTS = (same_batch,)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
