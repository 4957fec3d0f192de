"""What ranks in one process cost, against the same steps in plain PyTorch.

The program is a small DDP program in eight ranks.

python benchmarks/ranks.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contest import Contender, Row, compared, hold, timed
from torchstrategy.testing import run_ranks

RANKS, STEPS = 8, 5


def fit(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.rand(16, 32)).square().mean().backward()
        optimizer.step()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def rank_of_ddp(rank: int) -> None:
    dist.init_process_group("nccl")
    fit(DistributedDataParallel(make_model()))


def in_ranks() -> None:
    run_ranks(rank_of_ddp, RANKS)


def one_after_another() -> None:
    for _ in range(RANKS):
        fit(make_model())


def ranks(rounds: int) -> Iterator[Row]:
    """A whole run, with the threads and the process groups.

    Other threads than this one compute.
    """
    contenders = {
        "plain PyTorch": Contender(timed(one_after_another, 1, time.perf_counter)),
        "run_ranks": Contender(
            timed(in_ranks, 1, time.perf_counter), ("plain PyTorch",)
        ),
    }
    yield from compared(f"{RANKS} ranks of DDP, {STEPS} steps", contenders, rounds)


CONTESTS = (ranks,)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
