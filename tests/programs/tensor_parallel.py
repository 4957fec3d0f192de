"""Tensor and sequence parallelism over a device mesh, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

_world_size = int(os.environ["WORLD_SIZE"])
device_type = torch.accelerator.current_accelerator().type


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.relu, self.out_proj = (
            nn.Linear(10, 32),
            nn.ReLU(),
            nn.Linear(32, 5),
        )

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


device_mesh = init_device_mesh(device_type=device_type, mesh_shape=(_world_size,))
_rank = device_mesh.get_rank()
assert _world_size % 2 == 0, (
    f"TP examples require even number of GPUs, but got {_world_size} gpus"
)
torch.manual_seed(0)
tp_model = parallelize_module(
    module=ToyModel().to(device_type),
    device_mesh=device_mesh,
    parallelize_plan={
        "in_proj": ColwiseParallel(input_layouts=Shard(0)),
        "out_proj": RowwiseParallel(output_layouts=Shard(0)),
    },
)
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.25, foreach=True)
for i in range(3):
    torch.manual_seed(i + _rank)
    output = tp_model(torch.rand(4, 10, device=device_type))
    output.sum().backward()
    optimizer.step()
    if _rank == 0:
        print(f"Tensor Parallel iter {i} completed")
dist.destroy_process_group()
