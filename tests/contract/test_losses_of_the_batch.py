"""Losses that are not a mean over rows: what docs/features.md says of them is plain PyTorch's gradient, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from problems import deal

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

F64 = torch.float64
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)


def context() -> torchstrategy.ReplicaContext:
    found = torchstrategy.get_replica_context()
    assert found is not None
    return found


def all_reduce(*values: Any) -> Any:
    return context().all_reduce("sum", values)


def all_gather(*values: Any) -> Any:
    return context().all_gather(values, axis=0)


def rmse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    squares, count = all_reduce((outputs - targets).square().sum(), outputs.numel())
    return (squares / count).sqrt()


def dice_of(overlap: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return 1 - 2 * overlap / size


def dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inside = outputs.sigmoid()
    return dice_of(*all_reduce((inside * targets).sum(), (inside + targets).sum()))


def plain_dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inside = outputs.sigmoid()
    return dice_of((inside * targets).sum(), (inside + targets).sum())


def routes_of(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    routes = outputs.softmax(1)
    return routes, F.one_hot(routes.argmax(1), routes.shape[1]).to(routes.dtype)


def balance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    routes, chosen = routes_of(outputs)
    chosen_by_all, routed, count = all_reduce(chosen.sum(0), routes.sum(0), len(routes))
    return routes.shape[1] * (chosen_by_all / count * (routed / count)).sum()


def plain_balance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    routes, chosen = routes_of(outputs)
    return routes.shape[1] * (chosen.mean(0) * routes.mean(0)).sum()


def plain_info_nce(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs @ targets.T, torch.arange(len(outputs), device=outputs.device))


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    targets = targets.clamp(min=0)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return torchstrategy.nn.compute_average_loss(losses, WEIGHTS.to(outputs.device)[targets])


def ignoring(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none", ignore_index=-100)
    return torchstrategy.nn.compute_average_loss(losses, targets != -100)


# What a step says, and what plain PyTorch says.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "rmse": (rmse, lambda outputs, targets: F.mse_loss(outputs, targets).sqrt()),
    "dice": (dice, plain_dice),
    "balance": (balance, plain_balance),
    "info_nce": (lambda outputs, targets: plain_info_nce(*all_gather(outputs, targets)), plain_info_nce),
    "class_weights": (weighted, lambda outputs, targets: F.cross_entropy(outputs, targets.clamp(min=0), WEIGHTS)),
    "ignore_index": (ignoring, F.cross_entropy),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [9, 5, 2])
def test_the_line_in_the_docs_is_plain_pytorch(strategy: torchstrategy.Strategy, name: str, rows: int) -> None:
    """Replicas with different numbers of rows, and none: a loss over the rows of each is off by up to a half."""
    loss, plain = LOSSES[name]
    twin = nn.Linear(3, 4, dtype=F64)
    model = strategy.distribute_module(copy.deepcopy(twin))
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.rand(rows, 3, dtype=F64, generator=generator)
    marks = torch.rand(rows, 4, dtype=F64, generator=generator).round()
    classes = torch.tensor([0, 3, -100, 1, 1, -100, -100, 2, 3])[:rows]
    targets = classes if name in ("class_weights", "ignore_index") else marks

    strategy.run(lambda batch: loss(model(batch[0]), batch[1]).backward(), args=(deal(strategy, (inputs, targets)),))
    plain(twin(inputs), targets).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-10, atol=1e-13)
