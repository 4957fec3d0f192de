"""A training that goes on from a checkpoint, in another number of processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy
from torchstrategy._group import workers
from workers.trainings import Net, batches, cross_entropy, strategy_of


def of_steps(
    strategy: torchstrategy.Strategy, checkpoint: dict[str, Any] | None, last: int
) -> dict[str, Any]:
    """The checkpoint after so many steps.

    An epoch has batches of 8, 8 and 6 rows, in a new order.
    """
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*batches([22])[0]), batch_size=8, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    steps = 0
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        # torch would train on the tensors in it.
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        scheduler.load_state_dict(checkpoint["scheduler"])
        dataset.load_state_dict(checkpoint["dataset"])
        torch.set_rng_state(checkpoint["random"])
        steps = checkpoint["steps"]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()
        scheduler.step()

    while steps < last:
        for batch in dataset:
            strategy.run(step, args=(batch,))
            steps += 1
            if steps == last:
                break
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "dataset": dataset.state_dict()
        if isinstance(dataset, torchstrategy.DistributedDataset)
        else None,
        "random": torch.get_rng_state(),
        "steps": steps,
    }


def of_workers(
    replicas: int, checkpoint: dict[str, Any] | None, last: int
) -> dict[str, Any]:
    return of_steps(strategy_of(replicas), checkpoint, last)


class Widths(torch.nn.Module):
    """Layers of several widths, of which a step may freeze one or leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 13)
        self.hidden = torch.nn.Linear(13, 13)
        self.extra = torch.nn.Linear(13, 13)
        self.last = torch.nn.Linear(13, 3)

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.hidden(x))
        if with_extra:
            x = torch.tanh(self.extra(x))
        return self.last(x)


def _ordinary(model: Widths, x: torch.Tensor, number: int) -> None:
    model(x, True).square().mean().backward()


def _by_turns(model: Widths, x: torch.Tensor, number: int) -> None:
    model(x, number % 2 == 0).square().mean().backward()


def _frozen_later(model: Widths, x: torch.Tensor, number: int) -> None:
    model.hidden.requires_grad_(number < 3)
    model(x, True).square().mean().backward()


def _twice_later(model: Widths, x: torch.Tensor, number: int) -> None:
    model(x, True).square().mean().backward()
    if number >= 3:
        model(2 * x, False).square().mean().backward()


KINDS = {
    "ordinary": _ordinary,
    "a layer by turns": _by_turns,
    "a layer is frozen": _frozen_later,
    "two backwards": _twice_later,
}
LAST = 6


def unlike_after_restarts(kind: str, pack: int) -> list[tuple[int, str]]:
    """After which steps a training that begins anew there ends with other weights.

    It returns which weights, too.
    """
    size, workers.PACK = workers.PACK, pack
    try:
        states = _states(kind, None, 0)
        unlike = []
        for begin in range(1, LAST):
            resumed = _states(kind, states[begin - 1], begin)[-1]
            unlike += [
                (begin, name)
                for name, value in resumed.items()
                if not torch.equal(value, states[-1][name])
            ]
        return unlike
    finally:
        workers.PACK = size


def _states(
    kind: str, state: dict[str, torch.Tensor] | None, begin: int
) -> list[dict[str, torch.Tensor]]:
    """The weights after each step of a training with a strategy of its own."""
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    with strategy.scope():
        model = Widths()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state is not None:
        model.load_state_dict(state)
    rows = torch.randn(LAST, 23, 7, generator=torch.Generator().manual_seed(1))

    def step(x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        KINDS[kind](model, x, number)
        optimizer.step()

    states = []
    for number in range(begin, LAST):
        for x in strategy.experimental_distribute_dataset([rows[number]]):
            strategy.run(step, args=(x, number))
        states.append(
            {name: value.clone() for name, value in model.state_dict().items()}
        )
    return states
