"""Data parallelism by hand, as in the tutorial on distributed applications.

average_gradients, partitions.
"""

import math
import os
from random import Random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class DataPartitioner:
    def __init__(self, size, sizes, seed=1234):
        indexes = list(range(size))
        Random(seed).shuffle(indexes)
        self.partitions = []
        for fraction in sizes:
            part = int(fraction * size)
            self.partitions.append(indexes[:part])
            indexes = indexes[part:]


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    data, labels = torch.randn(64, 6), torch.randint(3, (64,))
    mine = DataPartitioner(64, [1.0 / size] * size).partitions[rank]
    model = nn.Linear(6, 3).cuda(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    num_batches = math.ceil(len(mine) / 8.0)
    for epoch in range(2):
        epoch_loss = 0.0
        for i in range(num_batches):
            rows = mine[8 * i : 8 * (i + 1)]
            optimizer.zero_grad()
            loss = F.cross_entropy(
                model(data[rows].cuda(rank)), labels[rows].cuda(rank)
            )
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(
            "Rank ", dist.get_rank(), ", epoch ", epoch, ": ", epoch_loss / num_batches
        )
    gathered = [torch.empty_like(model.weight) for _ in range(size)]
    dist.all_gather(gathered, model.weight.detach())
    assert all(torch.equal(weight, gathered[0]) for weight in gathered)


if __name__ == "__main__":
    dist.init_process_group("nccl", init_method="env://", rank=int(os.environ["RANK"]))
    run(dist.get_rank(), dist.get_world_size())
