"""One replica on one CPU: a loop in plain PyTorch, and under a strategy.

It is also there as other libraries have it.

python benchmarks/one_device.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy
from contest import Contender, Measure, Row, Work, compared, hold, left_out, timed

WIDTH, ROWS, LAYERS, STEPS, TURN = 64, 64, 5, 100, 10
BAR, CALL_LIMIT = 1.02, 15e-6

Batch = tuple[torch.Tensor, torch.Tensor]


class Trainer(NamedTuple):
    """A way to train: what is called for each batch of a loader."""

    net: nn.Module
    loader: Iterable[Batch]
    step: Callable[[Batch], Any]
    context: AbstractContextManager[Any] = nullcontext()

    def train(self, batches: Iterable[Batch]) -> None:
        with self.context:
            for batch in batches:
                self.step(batch)


def made() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A model, its optimizer and a loader of `STEPS` batches: the same at each call."""
    torch.manual_seed(0)
    layers = [
        m for _ in range(LAYERS - 1) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
    ]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    rows = TensorDataset(
        torch.randn(STEPS * ROWS, WIDTH), torch.randn(STEPS * ROWS, WIDTH)
    )
    return (
        net,
        torch.optim.SGD(net.parameters(), lr=0.01),
        DataLoader(rows, batch_size=ROWS),
    )


def stepping(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Callable[[Batch], None]:
    """The step, which is the same for all."""

    def step(batch: Batch) -> None:
        x, y = batch
        optimizer.zero_grad()
        backward(F.mse_loss(net(x), y))
        optimizer.step()

    return step


# It holds nothing.
def plain(context: AbstractContextManager[Any] = nullcontext()) -> Trainer:  # noqa: B008
    """Plain PyTorch, in a context."""
    net, optimizer, loader = made()
    return Trainer(net, loader, stepping(net, optimizer), context)


def under(make: Callable[[], torchstrategy.Strategy]) -> Trainer:
    """The same under a strategy."""
    strategy = make()
    with strategy.scope():
        net, optimizer, loader = made()
    step = stepping(net, optimizer)
    dealt = strategy.experimental_distribute_dataset(loader)
    return Trainer(net, dealt, lambda batch: strategy.run(step, args=(batch,)))


def of_accelerate() -> Trainer:
    """As Accelerate has it."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(*made())
    return Trainer(net, loader, stepping(net, optimizer, accelerator.backward))


def of_fabric() -> Trainer:
    """As Fabric has it."""
    fabric = importlib.import_module("lightning.fabric").Fabric(
        accelerator="cpu", devices=1
    )
    net, optimizer, loader = made()
    net, optimizer = fabric.setup(net, optimizer)
    return Trainer(
        net, fabric.setup_dataloaders(loader), stepping(net, optimizer, fabric.backward)
    )


STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "OneDevice": lambda: torchstrategy.OneDeviceStrategy("cpu"),
    "Central, one replica": lambda: torchstrategy.CentralStorageStrategy(["cpu"]),
}
WAYS: dict[str, Callable[[], Trainer]] = {
    "plain": plain,
    "plain, once more": plain,
    **{name: partial(under, make) for name, make in STRATEGIES.items()},
    "Accelerate": of_accelerate,
    "Fabric": of_fabric,
    '`with torch.device("cpu")`': lambda: plain(torch.device("cpu")),
}


def trainers() -> dict[str, Trainer]:
    """Those that can be had here. An epoch brings all to the same parameters."""
    found = {}
    for name, way in WAYS.items():
        try:
            found[name] = way()
        except ModuleNotFoundError as error:
            left_out(name, error)
            continue
        found[name].train(found[name].loader)
        for one, other in zip(
            found["plain"].net.parameters(), found[name].net.parameters(), strict=True
        ):
            assert torch.equal(one, other), name
    return found


def training(rounds: int) -> Iterator[Row]:
    """Steps on batches that are at hand, and on those of a loader."""
    found = trainers()
    at_hand = list(found["plain"].loader)
    for contest, batches in {
        "a step": at_hand,
        "a step and its `DataLoader`": None,
    }.items():
        contenders = {
            name: Contender(
                per_step(trainer, batches or trainer.loader),
                () if name == "plain" else ("plain",),
                BAR if name in STRATEGIES else None,
            )
            for name, trainer in found.items()
        }
        # The turns are short, and a percent is looked for.
        yield from compared(contest, contenders, 40 * rounds)


def per_step(trainer: Trainer, batches: Iterable[Batch]) -> Measure:
    """The seconds of a step, without end."""
    epochs = itertools.chain.from_iterable(itertools.repeat(batches))
    measure = timed(lambda: trainer.train(itertools.islice(epochs, TURN)), 1)
    return lambda: measure() / TURN


def calls() -> dict[str, Work]:
    """`run` of a function that does nothing."""
    works: dict[str, Work] = {}
    for name, make in STRATEGIES.items():
        strategy = make()
        value = strategy.experimental_distribute_values_from_function(
            lambda _: torch.ones(ROWS, WIDTH)
        )
        works[f"{name}, no argument"] = partial(strategy.run, nothing)
        works[f"{name}, a per-replica batch"] = partial(
            strategy.run, nothing, ((value, value),)
        )
    return works


def nothing(batch: object = None) -> None:
    """Does nothing."""


def call(rounds: int) -> Iterator[Row]:
    """What a call of `run` takes: again and again, and between steps.

    Between steps, no cache holds its code any more.
    """
    trainer = plain()
    (batch, *_) = trainer.loader

    def between_steps(work: Work) -> Measure:
        measure = timed(work, 1)

        def of_some() -> float:
            return statistics.median(
                [(trainer.step(batch), measure())[1] for _ in range(TURN)]
            )

        return of_some

    works = calls()
    again = {
        name: Contender(timed(work, 1000), limit=CALL_LIMIT)
        for name, work in works.items()
    }
    yield from compared("`run` of an empty function", again, rounds, "µs")
    between = {
        name: Contender(between_steps(work))
        for name, work in {"no run": nothing, **works}.items()
    }
    yield from compared("the same, between steps", between, 4 * rounds, "µs")


def allocated(rounds: int) -> Iterator[Row]:
    """The most memory that a call of `run` holds."""

    def at_most(work: Work) -> float:
        tracemalloc.start()
        work()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - before

    contenders = {
        name: Contender(partial(at_most, work)) for name, work in calls().items()
    }
    yield from compared("memory of such a call", contenders, 1, "B")


CONTESTS = (training, call, allocated)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
