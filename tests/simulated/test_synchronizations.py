"""A run does not wait for a device: whatever it checks, it asks for no number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy
from problems import data, deal, mse, sgd
from torchstrategy.testing import simulated_devices

SIM = simulated_devices()
WAITING = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"}


class Waits(TorchDispatchMode):
    """Counts a thread's operations for which a program waits.

    They bring numbers from a device to the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        given = [value.device.type for value in args if isinstance(value, torch.Tensor)]
        from_device = any(kind != "cpu" for kind in given)
        to_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        if from_device and (name in WAITING or to_host):
            self.counts[name] += 1
        return result


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    mse(model, batch).backward()
    optimizer.step()


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    mse(model, batch).backward()


def evaluates(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    with torch.no_grad():
        mse(model, batch)


class Kept(nn.Module):
    """A layer that keeps a tensor of its rows and a number, and writes on a buffer.

    It keeps them in attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.add_(1)
        self.outputs = self.layer(x)
        return self.outputs


@pytest.mark.parametrize("what", [trains, accumulates, evaluates])
@pytest.mark.parametrize(
    "kind", ["central", "central, other parameter device", "mirrored"]
)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2).double(), Kept], ids=["Linear", "Kept"]
)
def test_a_warm_run_asks_no_device_for_a_number(
    what: Callable[..., None], kind: str, make: Callable[[], nn.Module]
) -> None:
    if kind == "mirrored":
        strategy: torchstrategy.Strategy = torchstrategy.MirroredStrategy(
            [SIM[0], SIM[1]]
        )
    else:
        strategy = torchstrategy.CentralStorageStrategy(
            [SIM[0], SIM[1]], SIM[2 if "other" in kind else 0]
        )
    with strategy.scope():
        model = make()
        optimizer = sgd(model)
    in_replicas = [Waits(), Waits()]

    def step(batch: Any) -> None:
        with in_replicas[torchstrategy.get_replica_context().replica_id_in_sync_group]:
            what(model, optimizer, batch)

    batch = deal(strategy, data(8))
    # In run 1, 2, 4, 8 and so on the numbers of replicas' buffers are compared, for a
    # warning.
    for _ in range(4):
        strategy.run(step, args=(batch,))
    for one in in_replicas:
        one.counts.clear()
    with Waits() as around:
        strategy.run(step, args=(batch,))
    assert [one.counts for one in (around, *in_replicas)] == [{}, {}, {}]


def test_a_wait_is_counted() -> None:
    with Waits() as waits:
        bool(torch.ones(1, device=SIM[0]) == 1)
        torch.ones(1, device=SIM[0]).cpu()
    assert len(waits.counts) == 2
