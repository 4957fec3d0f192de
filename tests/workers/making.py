"""Steps that make and remove buffers, in several workers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import torchstrategy
from workers.trainings import Net, batches, cross_entropy, strategy_of


class Making(Net):
    """Makes a buffer that was None, adds another in each step, and removes a third."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)
        self.register_buffer("old", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = x.sum(0)
        self.register_buffer(
            f"made_{len(self._buffers)}", x.mean(0), persistent=len(self._buffers) < 4
        )
        self.old = None
        return super().forward(x) + self.first.sum()


def making(strategy: torchstrategy.Strategy) -> dict[str, Any]:
    with strategy.scope():
        model = Making()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.experimental_distribute_dataset(batches((8, 1, 5))):
            strategy.run(step, args=(batch,))
    return {
        "saved": list(model.state_dict()),
        "numbers": {
            name: value
            for name, value in (*model.named_buffers(), *model.named_parameters())
        },
        "warned": sorted(
            str(one.message).partition(" has other numbers")[0] for one in caught
        ),
    }


def of_workers(replicas: int) -> dict[str, Any]:
    return making(strategy_of(replicas))


def of_one_only(what: str, replicas: int) -> Any:
    """A step that makes or removes something in worker 1 only."""
    strategy = strategy_of(replicas)
    is_culprit = strategy.extended._workers.index == 1
    with strategy.scope():
        model = nn.BatchNorm1d(2)

    def step() -> None:
        model(torch.ones(2, 2))
        if is_culprit:
            if what == "made":
                model.register_buffer("more", torch.ones(2))
            elif what == "removed":
                model.running_mean = None
            elif replicas > 1:
                model.register_forward_hook(lambda *_: None)

    try:
        strategy.run(step)
    except torchstrategy.WorkerError as error:
        mean = model.running_mean
        return (
            str(error),
            list(model._buffers),
            None if mean is None else mean.tolist(),
            int(model.num_batches_tracked),
        )
    return None
