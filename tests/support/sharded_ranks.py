"""A training whose model `fully_shard` shares out among ranks.

The same one in plain PyTorch is there, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchstrategy


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches() -> list[torch.Tensor]:
    """Of uneven rows, and the last one of one row, so that most ranks have none.

    All ranks but one have none.
    """
    rows = torch.randn(
        16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return [rows[:8], rows[8:15], rows[15:]]


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor
) -> None:
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def trained_in_shards(rank: int) -> torch.Tensor:
    """The parameters that a rank comes to.

    The device is the one that the strategy chooses for the rank.
    """
    strategy = torchstrategy.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model: Any = make_net().to(strategy.extended.worker_devices[0])
        for part in (model[0], model[2], model):
            fully_shard(part)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(partial(step, model, optimizer), args=(batch,))
    return torch.cat(
        [
            parameter.full_tensor().detach().cpu().flatten()
            for parameter in model.parameters()
        ]
    )


def trained_plainly() -> torch.Tensor:
    """The parameters that plain PyTorch comes to."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for rows in batches():
        step(model, optimizer, rows)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
