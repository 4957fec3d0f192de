"""A distributed dataset is generic in its batch: as the step gets it.

It is what the loader yields.
"""

from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import reveal_type

import torchstrategy


@dataclass
class Batch:
    """Inputs and targets."""

    inputs: torch.Tensor
    targets: torch.Tensor


strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
batches = [Batch(torch.ones(4, 3), torch.ones(4, 1))]
dataset = strategy.experimental_distribute_dataset(batches)
reveal_type(dataset)  # DistributedDataset[Batch]
iterator = iter(dataset)
reveal_type(next(iterator))  # Batch
reveal_type(iter(dataset).get_next())  # Batch
reveal_type(len(dataset))  # int

rows = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(rows, batch_size=4)
distributed = strategy.experimental_distribute_dataset(loader)
reveal_type(distributed.batch_size)  # int | None
print(len(distributed.dataset), distributed.sampler)
for inputs, targets in distributed:
    strategy.run(lambda x, y: (x * y).mean(), args=(inputs, targets))
