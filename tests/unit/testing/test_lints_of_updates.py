"""Lints of what an optimizer updates, and with what. Right programs that look alike are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau

from torchstrategy.testing import Finding, lint_training, run_ranks

RANKS = 2

pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of:UserWarning"
)  # torch's, of a scheduler whose optimizer makes no step


def findings_of(program: Callable[[], object]) -> list[Finding]:
    with lint_training(check=False) as record:
        program()
    return record.findings


def names_of(program: Callable[[], object]) -> list[str]:
    return [finding.name for finding in findings_of(program)]


def make_model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *more, nn.ReLU(), nn.Linear(8, 1))


def rows(steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        yield torch.randn(32, 4, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module, lr: float = 0.01, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, after: Callable[[], object] = list) -> None:
    dtype = next(model.parameters()).dtype
    for batch in rows(steps):
        optimizer.zero_grad()
        model(batch.to(dtype)).float().square().mean().backward()
        optimizer.step()
        after()


# NaN


def test_ranks_that_all_have_nan_are_alike() -> None:
    """A gradient that is NaN on all ranks was reduced. The NaN of a rank may have other bits."""

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(make_model())
        fit(model, sgd(model, 1e20))
        assert torch.isnan(model.module[0].weight).any()

    assert names_of(lambda: run_ranks(program, RANKS)) == []
