"""Trainings with means over tokens, in several workers that count theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchstrategy
from torchstrategy import RunOptions
from workers.trainings import strategy_of

TOKENS = 5
# By batch, the valid tokens of each row: some workers have fewer rows, some have no
# row, and some no token.
VALID = (
    (5, 1, 2, 4, 1, 3, 2),
    (3, 5, 4, 1, 0, 0),
    (4,),
    (1, 5, 0),
    (2, 0, 0, 0, 0, 0, 0, 0),
)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for valid in VALID:
        x = torch.randn(len(valid), TOKENS, 3, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (len(valid), TOKENS), generator=generator)
        labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = -100
        made.append((x, labels))
    return made


def tokens(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


def masked_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """Without tokens it is 0 / 0, and its gradient is NaN."""
    losses = nn.functional.cross_entropy(
        model(batch[0]).transpose(1, 2), batch[1], reduction="none"
    )
    mask = batch[1] != -100
    return (losses * mask).sum() / mask.sum()


def trained(
    strategy: Any, options: RunOptions | None, accumulates: int
) -> dict[str, torch.Tensor]:
    """The weights, and the gradients that the last run has left."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k, batch in enumerate(strategy.experimental_distribute_dataset(batches() * 2)):

        def step(batch: Any, updates: bool) -> None:
            (masked_mean(model, batch) / accumulates).backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()

        # The function gets the arguments of the step, of which it needs one.
        strategy.run(step, args=(batch, (k + 1) % accumulates == 0), options=options)
    gradients = {
        f"{name}.grad": p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {**model.state_dict(), **gradients}


def in_workers(
    replicas: int, accumulates: int, by_constructor: bool
) -> dict[str, torch.Tensor]:
    def count(batch: Any, updates: bool) -> torch.Tensor:
        return tokens(batch)

    if by_constructor:
        return trained(strategy_of(replicas, examples=count), None, accumulates)
    return trained(strategy_of(replicas), RunOptions(examples=count), accumulates)


def asked(replicas: int) -> list[tuple[int, list[int]]]:
    """For each batch, how many replicas this worker asked, with how many rows."""
    strategy = strategy_of(replicas)
    found = []
    for batch in strategy.experimental_distribute_dataset(batches()):
        seen: list[int] = []
        strategy.run(
            lambda b: None,
            args=(batch,),
            options=RunOptions(
                examples=lambda b, seen=seen: seen.append(len(b[0])) or 1
            ),  # type: ignore[misc]
        )
        found.append((len(seen), seen))
    return found


def refused(replicas: int, answer: Any) -> list[str]:
    """What each worker hears if the last replica of all returns something else.

    The weights after a good run are there, too.
    """
    strategy = strategy_of(replicas)
    heard = []
    last = strategy.num_replicas_in_sync - 1

    def count(batch: Any) -> Any:
        context = torchstrategy.get_replica_context()
        assert context is not None
        return answer if context.replica_id_in_sync_group == last else tokens(batch)

    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(3, 4).double()
    batch, *_ = strategy.experimental_distribute_dataset(batches()[:1])
    called = []

    def step(batch: Any) -> None:
        called.append(1)
        masked_mean(model, batch).backward()

    try:
        strategy.run(step, args=(batch,), options=RunOptions(examples=count))
    except (TypeError, ValueError) as error:
        heard.append(f"{type(error).__name__}: {error}")
    assert not called and model.weight.grad is None
    strategy.run(step, args=(batch,), options=RunOptions(examples=tokens))
    return [*heard, repr(model.weight.grad.sum().item())]


def statistics(strategy: Any, options: RunOptions | None) -> torch.Tensor:
    """The running means of a layer, which are over rows.

    All workers have two rows at least, or it would fail.
    """
    with strategy.scope():
        norm, model = nn.BatchNorm1d(3).double(), nn.Linear(3, 4).double()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, TOKENS, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (11, TOKENS), generator=generator)
    labels[6:, 1:] = -100

    def step(batch: Any) -> None:
        norm(batch[0][:, 0])
        masked_mean(model, batch).backward()

    for batch in strategy.experimental_distribute_dataset([(x, labels)]):
        strategy.run(step, args=(batch,), options=options)
    return norm.running_mean


def statistics_in_workers(replicas: int) -> torch.Tensor:
    return statistics(strategy_of(replicas), RunOptions(examples=tokens))
