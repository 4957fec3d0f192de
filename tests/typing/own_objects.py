"""A module and an optimizer that were made elsewhere stay of their own class."""

import torch
from typing_extensions import reveal_type

import torchstrategy


class Net(torch.nn.Module):
    """A network with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(inputs)
        return scores

    def classes(self) -> int:
        return self.head.out_features


strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
model = strategy.distribute_module(Net())
reveal_type(model)  # Net
print(model.classes())
optimizer = strategy.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
reveal_type(optimizer)  # SGD
