"""One replica on one CPU: a training loop in plain PyTorch, under a strategy, and as other libraries have it.

python benchmarks/one_device.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy
from contest import Contender, Measure, Row, Work, compared, hold, left_out, timed

WIDTH, ROWS, LAYERS, STEPS, TURN = 64, 64, 5, 100, 10
BAR, CALL_BAR = 1.02, 15e-6

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
    layers = [m for _ in range(LAYERS - 1) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    rows = TensorDataset(torch.randn(STEPS * ROWS, WIDTH), torch.randn(STEPS * ROWS, WIDTH))
    return net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(rows, batch_size=ROWS)


def stepping(
    net: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> Callable[[Batch], None]:
    """The step, which is the same for all."""

    def step(batch: Batch) -> None:
        x, y = batch
        optimizer.zero_grad()
        backward(F.mse_loss(net(x), y))
        optimizer.step()

    return step


def plain(context: AbstractContextManager[Any] = nullcontext()) -> Trainer:  # noqa: B008  it holds nothing
    """Plain PyTorch, in a context."""
    net, optimizer, loader = made()
    return Trainer(net, loader, stepping(net, optimizer), context)


def under(strategy: torchstrategy.Strategy) -> Trainer:
    """The same under a strategy."""
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
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net, optimizer, loader = made()
    net, optimizer = fabric.setup(net, optimizer)
    return Trainer(net, fabric.setup_dataloaders(loader), stepping(net, optimizer, fabric.backward))


WAYS: dict[str, Callable[[], Trainer]] = {
    "plain": plain,
    "plain, once more": plain,
    "OneDevice": lambda: under(torchstrategy.OneDeviceStrategy("cpu")),
    "Central, one replica": lambda: under(torchstrategy.CentralStorageStrategy(["cpu"])),
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
        for one, other in zip(found["plain"].net.parameters(), found[name].net.parameters(), strict=True):
            assert torch.equal(one, other), name
    return found


def training(rounds: int) -> Iterator[Row]:
    """Steps on batches that are at hand, and on those of a loader."""
    found = trainers()
    at_hand = list(found["plain"].loader)
    for contest, batches in {"a step": at_hand, "a step and its `DataLoader`": None}.items():
        contenders = {}
        for name, trainer in found.items():
            epochs = itertools.chain.from_iterable(itertools.repeat(batches or trainer.loader))
            measure = per_step(lambda trainer=trainer, epochs=epochs: trainer.train(itertools.islice(epochs, TURN)))
            is_ours = name in ("OneDevice", "Central, one replica")
            contenders[name] = Contender(measure, () if name == "plain" else ("plain",), BAR if is_ours else None)
        yield from compared(contest, contenders, 40 * rounds)  # the turns are short, and a percent is looked for


def per_step(turn: Work) -> Measure:
    """The seconds of a step."""
    measure = timed(turn, 1)
    return lambda: measure() / TURN


def calls() -> dict[str, Work]:
    """`run` of a function that does nothing."""
    works: dict[str, Work] = {}
    for strategy in (torchstrategy.OneDeviceStrategy("cpu"), torchstrategy.CentralStorageStrategy(["cpu"])):
        make = strategy.experimental_distribute_values_from_function
        batch = make(lambda _: torch.ones(ROWS, WIDTH)), make(lambda _: torch.ones(ROWS, WIDTH))
        name = type(strategy).__name__.removesuffix("Strategy")
        works[f"{name}, no argument"] = lambda strategy=strategy: strategy.run(lambda: None)
        works[f"{name}, a batch"] = lambda strategy=strategy, batch=batch: strategy.run(lambda batch: None, (batch,))
    return works


def call(rounds: int) -> Iterator[Row]:
    """What a call of `run` takes."""
    contenders = {name: Contender(timed(work, 1000), bar=CALL_BAR) for name, work in calls().items()}
    yield from compared("`run` of an empty function", contenders, rounds, "µs")


CONTESTS = (training, call)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
