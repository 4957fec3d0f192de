"""Steps, updates and callers that draw random numbers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import torchstrategy
from workers.trainings import Net, batches, cross_entropy, strategy_of


def _drawn(strategy: torchstrategy.Strategy, seed: int) -> dict[str, torch.Tensor]:
    """A training with dropout, in which the caller draws between runs.

    Its updates draw, too.
    """
    with strategy.scope():
        model = Net(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(
        lambda *_: model.unused.bias.data.add_(torch.rand(2, dtype=torch.float64))
    )

    def step(batch: Any, noise: torch.Tensor) -> None:
        optimizer.zero_grad()
        x, y = batch
        cross_entropy(model, x + noise, y).backward()
        optimizer.step()

    def some() -> torch.Tensor:
        context = torchstrategy.get_replica_context()
        return (
            torch.rand(2) if context.replica_id_in_sync_group == 3 else torch.zeros(2)
        )

    # After the first run all workers draw what the first one does.
    torch.manual_seed(seed)
    noises, drawn = [torch.zeros(4, dtype=torch.float64)], []
    for batch in strategy.experimental_distribute_dataset(batches((8, 8, 6, 3, 8))):
        strategy.run(step, args=(batch, noises[-1]))
        noises.append(torch.randn(4, dtype=torch.float64))
        # Only the last replica draws, and so the caller's generator moves on by one
        # number.
        drawn.append(strategy.reduce("sum", strategy.run(some), axis=None))
    after = torch.rand(3)
    return {
        **model.state_dict(),
        "noises": torch.stack(noises),
        "drawn": torch.stack(drawn),
        "after": after,
    }


def of_workers(replicas: int) -> dict[str, torch.Tensor]:
    strategy = strategy_of(replicas)
    return _drawn(strategy, seed=strategy.extended._workers.index)


def of_lone_workers() -> dict[str, torch.Tensor]:
    """What the replica draws in steps, what callers and updates draw, and the weights.

    The third batch has one row.
    """
    strategy = strategy_of(1)
    with strategy.scope():
        model = Net(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own, shared = [], []
    optimizer.register_step_post_hook(lambda *_: shared.append(torch.rand(2)))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        own.append(torch.rand(2))
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(batches((8, 6, 1, 8))):
        strategy.run(step, args=(batch,))
        shared.append(torch.rand(2))
    weights = torch.cat(
        [parameter.detach().flatten() for parameter in model.parameters()]
    )
    return {"own": torch.stack(own), "shared": torch.stack(shared), "weights": weights}


def of_unlike_draws() -> tuple[list[str], list[float], list[float]]:
    """Only worker 1 draws in two steps.

    Returns what was warned of, and what callers draw before and after that.
    """
    strategy = strategy_of(1)
    with strategy.scope():
        model = Net()

    def step(draws: bool) -> None:
        if draws and strategy.extended._workers.index == 1:
            torch.rand(2)
        if not draws:
            cross_entropy(model, *batches((4,))[0]).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(step, args=(False,))
        before = torch.rand(3).tolist()
        for draws in (True, True, False):
            strategy.run(step, args=(draws,))
        after = torch.rand(3).tolist()
        strategy.run(step, args=(False,))
    return [str(one.message) for one in caught], before, after


def of_one_process() -> dict[str, torch.Tensor]:
    return _drawn(torchstrategy.MirroredStrategy(["cpu"] * 4), seed=0)


def of_a_nested_run() -> None:
    strategy = strategy_of(1)

    def merged(strategy: torchstrategy.Strategy) -> None:
        strategy.run(lambda: None)

    strategy.run(lambda: torchstrategy.get_replica_context().merge_call(merged))
