"""Workers of a strategy in ranks of one process train together.

Failures and differences are named.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import for_changes
from sharded_ranks import trained_in_shards, trained_plainly
from torchstrategy.testing import run_ranks

Make = Callable[[nn.Module, int], torch.optim.Optimizer]


def sgd(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(rank: int, make: Make = sgd, fails: bool = False) -> torch.Tensor:
    """What a worker comes to in two steps. It makes no process group itself."""
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    torch.manual_seed(rank)
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = make(model, rank)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if fails and rank:
            raise ValueError("no such row")
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset([torch.ones(5, 3)] * 2):
        strategy.run(step, args=(batch,))
    return model.weight.detach()


def test_workers_train_together() -> None:
    (one, other), record = run_ranks(trained, 2)
    assert torch.equal(one, other)
    assert record.counts["all_reduce"] == 2


@for_changes
@pytest.mark.parametrize("count", [2, 3])
def test_workers_share_out_a_model_and_have_the_numbers_of_plain_torch(
    count: int,
) -> None:
    for found in run_ranks(trained_in_shards, count)[0]:
        torch.testing.assert_close(found, trained_plainly(), rtol=1e-12, atol=1e-14)


def test_the_error_of_a_worker_is_that_of_the_run() -> None:
    with pytest.raises(ValueError, match="no such row"):
        run_ranks(trained, 3, args=(sgd, True))


@for_changes
def test_other_settings_of_a_second_optimizer_are_named() -> None:
    kept = []

    def make(model: nn.Module, rank: int) -> torch.optim.Optimizer:
        kept.append(torch.optim.SGD([model.bias], lr=0.1))
        return torch.optim.SGD([model.weight], lr=0.1 + rank)

    with pytest.raises(
        torchstrategy.WorkerError,
        match=r"optimizer 2 of the scope\): lr=0\.1, worker 1 .* lr=1\.1",
    ):
        run_ranks(trained, 2, args=(make,))
