"""A trainer that takes any strategy, and functions without annotations.

Type checkers leave these alone.
"""

from typing import Any

import torch
from typing_extensions import reveal_type

import torchstrategy


class Trainer:
    """Trains a model, on whatever devices the strategy has."""

    def __init__(self, strategy: torchstrategy.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = torch.nn.Linear(3, 1)
            self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        context = torchstrategy.get_replica_context()
        assert context is not None
        reveal_type(context.replica_id_in_sync_group)  # int
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        result: torch.Tensor = loss.detach()
        return result

    def fit(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for batch in self.strategy.experimental_distribute_dataset(batches):
            loss = self.strategy.run(self.step, args=(batch,))
            reveal_type(loss)  # Tensor | PerReplica[Tensor]
            total += self.strategy.reduce("mean", loss, axis=None).item()
        return total


def untyped(batch):  # type: ignore[no-untyped-def]
    return batch.mean()


def anything(batch: torch.Tensor) -> Any:
    return batch.mean()


print(Trainer(torchstrategy.MirroredStrategy(["cpu"] * 2)).fit([torch.ones(4, 3)]))
print(Trainer(torchstrategy.get_strategy()).fit([torch.ones(4, 3)]))
strategy = torchstrategy.get_strategy()
reveal_type(strategy)  # Strategy
print(strategy.run(untyped, args=(torch.ones(2),)).item())
reveal_type(strategy.run(anything, args=(torch.ones(2),)))  # Any
