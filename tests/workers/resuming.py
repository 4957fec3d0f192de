"""A training that goes on, in another number of processes, where a checkpoint was taken."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy
from workers.trainings import Net, batches, cross_entropy, strategy_of


def of_steps(strategy: torchstrategy.Strategy, checkpoint: dict[str, Any] | None, last: int) -> dict[str, Any]:
    """The checkpoint after so many steps. An epoch has batches of 8, 8 and 6 rows, in a new order."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*batches([22])[0]), batch_size=8, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    steps = 0
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch would train on the tensors in it
        scheduler.load_state_dict(checkpoint["scheduler"])
        dataset.load_state_dict(checkpoint["dataset"])
        torch.set_rng_state(checkpoint["random"])
        steps = checkpoint["steps"]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()
        scheduler.step()

    while steps < last:
        for batch in dataset:
            strategy.run(step, args=(batch,))
            steps += 1
            if steps == last:
                break
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "dataset": dataset.state_dict() if isinstance(dataset, torchstrategy.DistributedDataset) else None,
        "random": torch.get_rng_state(),
        "steps": steps,
    }


def of_workers(replicas: int, checkpoint: dict[str, Any] | None, last: int) -> dict[str, Any]:
    return of_steps(strategy_of(replicas), checkpoint, last)
