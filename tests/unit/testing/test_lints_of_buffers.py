"""Lints of buffers, and of what a module writes on itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from conditions import for_changes, for_releases
from linted import names_of
from torchstrategy.testing import run_ranks

RANKS = 2


def lints(program: Callable[[int], Any]) -> list[str]:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        program(rank)

    return names_of(lambda: run_ranks(main, RANKS))


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(
        32, 4, generator=torch.Generator().manual_seed(100 * rank + step)
    )


# Buffers of several ranks


class Features(nn.Module):
    """Random waves, which are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(4, 8))
        self.register_buffer("kept", torch.randn(5, 3))
        self.head = nn.Linear(8, 1)
        self.waves: torch.Tensor
        self.kept: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head((rows @ self.waves).sin())
        return result


def trains_features(rank: int, sends: str, seed: int, fills: bool = False) -> None:
    torch.manual_seed(seed)
    model = Features()
    tensors = [*model.parameters(), *(model.buffers() if sends == "all" else ())]
    for tensor in tensors if sends != "nothing" else ():
        dist.broadcast(tensor.detach(), 0)
    if sends == "nothing":
        model.head.load_state_dict({"weight": torch.ones(1, 8), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(8):
        optimizer.zero_grad()
        model(rows_of(rank, step)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        if fills:  # a memory of its own rows
            model.kept.copy_(rows_of(rank, step)[:5, :3])


@for_releases
def test_buffers_that_are_not_broadcast_with_the_parameters() -> None:
    assert lints(lambda rank: trains_features(rank, "parameters", rank)) == [
        "weights-differ"
    ]
    assert lints(lambda rank: trains_features(rank, "all", rank)) == []
    assert lints(lambda rank: trains_features(rank, "parameters", 0)) == []


@for_changes
def test_buffers_of_ranks_that_broadcast_nothing_are_their_own() -> None:
    assert lints(lambda rank: trains_features(rank, "nothing", rank)) == []


@for_releases
def test_a_memory_of_each_rank_is_left_alone() -> None:
    assert lints(lambda rank: trains_features(rank, "all", rank, fills=True)) == []


# Statistics of a part that is computed again


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("norm", ["batch", "layer", "frozen"])
def test_statistics_that_count_each_batch_twice(norm: str, use_reentrant: bool) -> None:
    part = nn.Sequential(
        nn.Linear(4, 4),
        nn.LayerNorm(4) if norm == "layer" else nn.BatchNorm1d(4),
        nn.ReLU(),
    )
    if norm == "frozen":
        part[1].eval()

    def program() -> None:
        head = nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*part.parameters(), *head.parameters()], 0.1)
        for step in range(6):
            optimizer.zero_grad()
            found = checkpoint(
                part, rows_of(0, step).requires_grad_(), use_reentrant=use_reentrant
            )
            head(found).square().mean().backward()
            optimizer.step()

    assert names_of(program) == (
        ["statistics-counted-twice"] if norm == "batch" else []
    )
