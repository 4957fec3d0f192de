"""Writes between two runs, in one worker only."""

from __future__ import annotations

import torch
from torch import nn

from workers.trainings import strategy_of


def after_writes(replicas: int, what: str) -> str:
    """Trains, writes something in worker 1, and trains again.

    Returns the message of the refusal.
    """
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def train() -> None:
        for batch in strategy.experimental_distribute_dataset([torch.ones(8, 2)]):
            strategy.run(step, args=(batch,))

    train()
    is_other = not strategy.extended.should_checkpoint
    with torch.no_grad():
        if what == "a checkpoint in one worker" and is_other:
            model.load_state_dict(
                {name: value + 1 for name, value in model.state_dict().items()}
            )
        elif what == "statistics in one worker" and is_other:
            model(torch.ones(4, 2))
        elif what == "other weights in each worker":
            model[2].weight += float(is_other)
        elif what == "the same weights in one worker" and is_other:
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.zero_()
                parameter.copy_(value)
        elif what == "the same weights in all workers":
            model[0].weight.fill_(0.5)
    try:
        train()
    except RuntimeError as error:
        return str(error)
    train()
    return ""
