"""What steps write on plain attributes of modules and trainers, in several workers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import torchstrategy
from torchstrategy import DistributedValues
from workers.trainings import Net, batches, cross_entropy, strategy_of

SIZES = (7, 7, 1, 5, 7)  # in the third batch all workers but the first are understudies


OF_REPLICAS = ("hidden", "graph", "trainer loss", "trainer number", "trainer rows")


class Writing(Net):
    """Writes on attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.average, self.name = 0, 0.0, ""
        self.statistic = torch.zeros(4, dtype=torch.float64)
        self.in_place = torch.zeros(4, dtype=torch.float64)
        self.losses: list[float] = []
        self.by_name: dict[str, Any] = {"nested": {"sum": 0.0}, "mean": torch.zeros(2, dtype=torch.float64)}
        self.marked: Any = self.head.weight
        self.marked.calls, self.marked.average, self.marked.last = 0, torch.zeros(2, dtype=torch.float64), []
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
        return self.graph + self.average + self.statistic.sum() + self.in_place.sum() + self.by_name["mean"].sum()


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


def written(strategy: torchstrategy.Strategy) -> dict[str, Any]:
    """The attributes after each step. Of a value for each replica: those of the replicas of this worker."""
    with strategy.scope():
        trainer = Trainer()
    of_steps = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.experimental_distribute_dataset(batches(SIZES)):
            strategy.run(trainer.step, args=(batch,))
            own = [name for name in vars(trainer.model) if name in vars(Writing()) and not name.startswith("_")]
            found = {name: vars(trainer.model)[name] for name in own if name not in ("training", "marked")}
            found["marked"] = dict(vars(trainer.model.head.weight))
            found.update({f"trainer {name}": vars(trainer)[name] for name in ("steps", "number", "loss", "rows")})
            of_steps.append({name: _plain(value) for name, value in found.items()})
        if isinstance(trainer.rows, DistributedValues):
            of_steps[-1]["reduced rows"] = strategy.reduce("sum", trainer.rows, axis=None).item()
            of_steps[-1]["reduced loss"] = strategy.reduce("mean", trainer.loss, axis=None).item()
    names = sorted(str(one.message).partition(" has other")[0] for one in caught)
    return {"steps": of_steps, "model": trainer.model.state_dict(), "warned": names}


def _plain(value: Any) -> Any:
    if isinstance(value, DistributedValues):
        return [_plain(one) for one in value.values]
    if isinstance(value, torch.Tensor):
        return value.detach().round(decimals=10).tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return round(value, 10)
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def of_workers(replicas: int) -> dict[str, Any]:
    return written(strategy_of(replicas))


def of_lone_replicas() -> tuple[dict[str, Any], list[list[float]]]:
    """What a trainer and its model have kept, and the largest number of each row of this worker, by batch."""
    strategy = strategy_of(1)
    with strategy.scope():
        trainer = Trainer()
    rows: list[list[float]] = []

    def step(batch: Any) -> None:
        rows.append([row.mean().item() for row in batch[0]])
        trainer.step(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in strategy.experimental_distribute_dataset(batches(SIZES)):
            strategy.run(step, args=(batch,))
    kinds = {name: type(getattr(trainer, name)).__name__ for name in ("loss", "number", "rows")}
    losses = trainer.model.losses
    return {"steps": trainer.steps, "calls": trainer.model.calls, "kinds": kinds, "losses": losses}, rows
