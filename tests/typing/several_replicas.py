"""Several replicas: what a step returns is a per-replica value.

It is until `reduce` or `gather` makes one of it.
"""

import torch
from typing_extensions import reveal_type

import torchstrategy

strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
reveal_type(strategy)  # CentralStorageStrategy
with strategy.scope() as current:
    reveal_type(current)  # CentralStorageStrategy
    model = torch.nn.Linear(3, 1)


def evaluate(inputs: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = model(inputs).square().mean(1)
    return losses


def show() -> None:
    print("a step that returns nothing")


for batch in strategy.experimental_distribute_dataset([torch.ones(6, 3)]):
    losses = strategy.run(evaluate, args=(batch,))
    reveal_type(losses)  # Tensor | PerReplica[Tensor]
    reveal_type(strategy.reduce("mean", losses, axis=0))  # Tensor
    print(strategy.reduce(torchstrategy.ReduceOp.SUM, losses, axis=0).item())
    reveal_type(strategy.gather(losses, axis=0))  # Tensor
    reveal_type(strategy.experimental_local_results(losses))  # tuple[Tensor, ...]
    for own in strategy.experimental_local_results(losses):
        print(own.mean().item())
    if isinstance(losses, torchstrategy.PerReplica):
        reveal_type(losses.values)  # tuple[Tensor, ...]
strategy.run(show)
