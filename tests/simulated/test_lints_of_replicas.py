"""Lints of `nn.DataParallel`, which runs replicas of a model and throws them away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from linted import names_of
from torchstrategy.testing import cuda_alias


class Model(nn.Module):
    """It counts its calls, or keeps a mean, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls, self.width = way, 0, 0
        self.body = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("total", torch.zeros(4))
        self.mean: torch.Tensor
        self.total: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.way == "counts":
            self.calls += 1
        elif self.way == "counts at length":
            self.calls = self.calls + 1
        elif self.way == "replaces a mean":
            self.mean = 0.9 * self.mean + 0.1 * rows.mean(0).detach()
        elif self.way == "moves a mean":
            self.mean.lerp_(rows.mean(0).detach(), 0.1)
        elif self.way == "adds a sum":
            self.total.mul_(0.9).add_(rows.detach().sum(0), alpha=0.1)
        elif self.way == "counts in place":
            self.mean.add_(1)
        elif self.way == "notes a size":
            self.width = len(rows)
        result: torch.Tensor = self.body(rows - self.mean)
        return result


@pytest.mark.parametrize(
    ("way", "devices", "names"),
    [
        ("counts", [0, 1], ["written-on-a-replica"]),
        ("counts at length", [0, 1], ["written-on-a-replica"]),
        ("replaces a mean", [0, 1], ["written-on-a-replica"]),
        ("moves a mean", [0, 1], []),
        ("adds a sum", [0, 1], ["written-on-a-replica"]),
        ("adds a sum", [0], []),
        ("counts in place", [0, 1], []),
        ("notes a size", [0, 1], []),
        ("counts", [0], []),
    ],
)
def test_what_a_replica_writes_on_itself_is_named(
    way: str, devices: list[int], names: list[str]
) -> None:
    assert names_of(training(way, devices)) == names


def training(way: str, devices: list[int]) -> Callable[[], None]:
    def program() -> None:
        with cuda_alias():
            model = nn.DataParallel(Model(way).to("cuda"), device_ids=devices)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 4).to("cuda")).square().mean().backward()
                optimizer.step()

    return program
