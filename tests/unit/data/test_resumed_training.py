"""A training that was interrupted goes on to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from problems import mse, parameters, sgd
from resumable import ROWS, STEPS, batched, checkpoint, over, restore, saved_and_loaded
from torchstrategy import CentralStorageStrategy, OneDeviceStrategy, Strategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Augmented(Dataset):
    """Draws from torch's generator for each element."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(3.0) + index
        return x + torch.rand(3), x[:2]


class Training:
    """All that a training script has, made anew in each process."""

    def __init__(self, strategy: Strategy, seed: int) -> None:
        torch.manual_seed(seed)
        self.strategy = strategy
        with strategy.scope():
            self.model = Net()
            self.optimizer = sgd(self.model)
        self.dataset = over(batched(Augmented(), shuffle=True), strategy)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        mse(self.model, batch).backward()
        self.optimizer.step()

    def train(self, batches: Iterable[Any], steps: int | None = None) -> None:
        for batch in itertools.islice(batches, steps):
            self.strategy.run(self.step, args=(batch,))

    def save(self) -> Any:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **checkpoint(self.dataset),
        }
        return saved_and_loaded(state)

    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        restore(self.dataset, saved)


@pytest.mark.parametrize("replicas", [0, 3])
@pytest.mark.parametrize("steps", [None, 0, 2, STEPS, STEPS + 1])
def test_a_training_goes_on_to_the_last_bit(replicas: int, steps: int | None) -> None:
    # On the CPU, whose generator is the one in the checkpoint.
    strategy = (
        CentralStorageStrategy(["cpu"] * replicas)
        if replicas
        else OneDeviceStrategy("cpu")
    )
    through = Training(strategy, seed=1)
    iterator = iter(() if steps is None else through.dataset)
    through.train(iterator, steps)  # the step after the last one finds the end
    saved = through.save()
    through.train(iterator)
    through.train(through.dataset)
    drawn = torch.rand(1)

    resumed = Training(strategy, seed=2)
    resumed.load(saved)
    if steps is not None and steps <= STEPS:
        resumed.train(resumed.dataset)
    resumed.train(resumed.dataset)
    assert torch.equal(torch.rand(1), drawn)
    expected, found = parameters(through.model), parameters(resumed.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
