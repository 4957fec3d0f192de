"""What steps write on plain attributes of modules and trainers, in several workers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import torchstrategy
from workers.trainings import Net, batches, cross_entropy, strategy_of

SIZES = (7, 7, 1, 5, 7)  # in the third batch all workers but the first are understudies


class Writing(Net):
    """Writes on attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.average, self.name = 0, 0.0, ""
        self.statistic = torch.zeros(4, dtype=torch.float64)
        self.in_place = torch.zeros(4, dtype=torch.float64)
        self.losses: list[float] = []
        self.by_name: dict[str, Any] = {
            "nested": {"sum": 0.0},
            "mean": torch.zeros(2, dtype=torch.float64),
        }
        self.marked: Any = self.head.weight
        self.marked.calls, self.marked.average, self.marked.last = (
            0,
            torch.zeros(2, dtype=torch.float64),
            [],
        )
        self.pair: Any = None
        self.largest: Any = None
        self.odd: Any = None
        self.hidden: Any = None
        self.graph: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mean = float(x.mean())
        self.average = 0.9 * self.average + 0.1 * mean
        self.name = f"{mean:.3f}"
        self.statistic = 0.9 * self.statistic + 0.1 * x.mean(0)
        self.in_place.mul_(0.9).add_(x.mean(0))
        self.losses.append(mean)
        self.by_name["nested"]["sum"] += mean
        self.by_name["mean"] = self.by_name["mean"] + x[:, :2].mean(0)
        # What a step sets on a tensor is an attribute, too.
        self.marked.calls += 1
        self.marked.average = 0.9 * self.marked.average + 0.1 * x[:, :2].mean(0)
        self.marked.last.append(mean)
        self.pair = (mean, [self.calls])
        self.largest = x.max()
        if mean > 0:
            self.odd = mean
        self.hidden = x[:, 0] * 2
        self.graph = super().forward(x)
        return (
            self.graph
            + self.average
            + self.statistic.sum()
            + self.in_place.sum()
            + self.by_name["mean"].sum()
        )


class Trainer:
    """Keeps numbers of its last step."""

    def __init__(self) -> None:
        self.model = Writing()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps, self.number, self.kind = 0, 0.0, ""
        self.loss: Any = None
        self.rows = 0

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()
        self.number = loss.item()
        self.steps += 1
        self.rows = self.rows + len(batch[0])


def of_workers(replicas: int) -> dict[str, Any]:
    """What a trainer and its model have kept, and what plain PyTorch keeps.

    Plain PyTorch has the rows of the first replica here.
    """
    strategy = strategy_of(replicas)
    with strategy.scope():
        trainer = Trainer()
    rows: list[torch.Tensor] = []

    def step(batch: Any) -> None:
        if torchstrategy.get_replica_context().replica_id_in_sync_group % replicas == 0:
            rows.append(batch[0].clone())
        trainer.step(batch)

    with warnings.catch_warnings():
        # Replicas of one process tell each other of numbers that differ.
        warnings.simplefilter("error" if replicas == 1 else "ignore")
        for batch in strategy.experimental_distribute_dataset(batches(SIZES)):
            strategy.run(step, args=(batch,))
    plain = Writing()
    for x in rows:
        plain(x)
    return {
        "kept": _kept(trainer.model),
        "plain": _kept(plain),
        "rows": list(map(len, rows)),
        "steps": trainer.steps,
        "kinds": {
            name: type(getattr(trainer, name)).__name__
            for name in ("loss", "number", "rows")
        },
        "weights": trainer.model.state_dict(),
    }


def _kept(model: Writing) -> dict[str, Any]:
    """All that forward writes on the model, but for outputs of a replica."""
    names = (
        "calls",
        "average",
        "name",
        "statistic",
        "in_place",
        "losses",
        "by_name",
        "pair",
        "largest",
        "odd",
    )
    found = {name: getattr(model, name) for name in names}
    marked = {
        name: getattr(model.head.weight, name) for name in ("calls", "average", "last")
    }
    return {name: _plain(value) for name, value in {**found, "marked": marked}.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def of_unlike_kinds() -> None:
    """What worker 0's replicas have alike, and worker 1's have not, is summed."""
    strategy = strategy_of(2)
    with strategy.scope():
        trainer = Trainer()

    def step(batch: Any) -> None:
        trainer.step(batch)

    # Two rows for each replica but the last.
    for batch in strategy.experimental_distribute_dataset(batches((7,))):
        strategy.run(step, args=(batch,))
    strategy.reduce("sum", trainer.rows, axis=None)
