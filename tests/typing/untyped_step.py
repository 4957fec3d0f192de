"""A step without annotations that returns a dict, as most scripts have it."""

import torch

import torchstrategy

strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
model = torch.nn.Linear(1, 1)


def evaluate(inputs, targets):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        error = model(inputs) - targets
    return {"mse": error.square().mean(), "mae": error.abs().mean()}


(batch,) = strategy.experimental_distribute_dataset(
    [(torch.ones(4, 1), torch.ones(4, 1))]
)
metrics = strategy.run(evaluate, args=batch)
metrics = strategy.reduce("mean", metrics, axis=None, weights=batch)
print({name: value.item() for name, value in metrics.items()})
