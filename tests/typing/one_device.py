"""One replica: `run` returns what the step returns."""

import torch
from typing_extensions import reveal_type

import torchstrategy

strategy = torchstrategy.OneDeviceStrategy("cpu")
with strategy.scope():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


loss = strategy.run(train_step, args=(torch.ones(4, 3), torch.ones(4, 1)))
reveal_type(loss)  # Tensor
print(loss.item())
reveal_type(strategy.run(lambda: 3))  # int
