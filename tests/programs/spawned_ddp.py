"""The oldest form of a DDP program, with mp.spawn.

An address in the environment, a model of two layers.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def demo_checkpoint(rank, world_size, folder):
    setup(rank, world_size)
    ddp_model = DDP(ToyModel().to(rank), device_ids=[rank])
    path = os.path.join(folder, "model.checkpoint")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    map_location = {f"cuda:{0}": f"cuda:{rank}"}
    ddp_model.load_state_dict(
        torch.load(path, map_location=map_location, weights_only=True)
    )
    loss_fn, optimizer = nn.MSELoss(), torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    loss_fn(ddp_model(torch.randn(20, 10)), torch.randn(20, 5).to(rank)).backward()
    optimizer.step()
    if rank == 0:
        os.remove(path)
    print(f"rank {rank} of {world_size} is on {next(ddp_model.parameters()).device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    n_gpus = torch.cuda.device_count()
    assert n_gpus >= 2, f"Requires at least 2 GPUs to run, but got {n_gpus}"
    mp.spawn(demo_checkpoint, args=(n_gpus, sys.argv[1]), nprocs=n_gpus, join=True)
