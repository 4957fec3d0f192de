"""Runs with options, in several workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchstrategy
from torchstrategy import RunOptions
from workers.trainings import Net, batches, strategy_of


def of_options(
    strategy: torchstrategy.Strategy, options: RunOptions | None
) -> dict[str, torch.Tensor]:
    """Trains with sums over rows: each row counts once, replicas without rows add 0."""
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [
        strategy.reduce(
            "sum", strategy.run(step, args=(batch,), options=options), axis=None
        )
        for batch in strategy.experimental_distribute_dataset(batches())
    ]
    return {**model.state_dict(), "losses": torch.stack(losses)}


def of_workers(replicas: int, **options: Any) -> dict[str, torch.Tensor]:
    return of_options(strategy_of(replicas), RunOptions(**options))
