"""Replicas that share one CPU, against the same pieces of the batch by hand.

These come one after another.

    python benchmarks/replicas.py [--rounds N] [--json FILE]

By hand, a model is one and its gradients are added up where backward leaves them; or
each piece has a thread, and modules that share the memory of the parameters; or, as
MirroredStrategy has it, each has a model and an optimizer of its own, and gradients are
added up before each takes the same step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from contest import Contender, Row, Work, compared, hold, timed

ROWS, BAR = 256, 1.05
Batch = tuple[torch.Tensor, torch.Tensor]
Made = tuple[nn.Module, torch.optim.Optimizer]


def made(modules: int, width: int) -> Made:
    """Linear layers and activations in turns, and their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[m for _ in range(modules // 2) for m in (nn.Linear(width, width), nn.ReLU())]
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def pieces(batch: Batch, replicas: int) -> list[Batch]:
    """What each replica is dealt."""
    x, y = (tensor.chunk(replicas) for tensor in batch)
    return list(zip(x, y, strict=True))


def by_hand(make: Callable[[], Made], replicas: int, batch: Batch) -> Work:
    """Each piece forward and backward, weighed, and one step of the optimizer."""
    model, optimizer = make()

    def step() -> None:
        optimizer.zero_grad()
        for x, y in pieces(batch, replicas):
            (F.mse_loss(model(x), y) * (len(x) / ROWS)).backward()
        optimizer.step()

    return step


def threads_by_hand(make: Callable[[], Made], replicas: int, batch: Batch) -> Work:
    """The least that replicas are: modules that share the parameters' memory.

    Each is on a thread, one after another.
    """
    model, optimizer = make()
    owners = list(model.parameters())
    copies = [
        [nn.Parameter(owner.detach()) for owner in owners] for _ in range(replicas)
    ]
    models = [
        copy.deepcopy(model, {id(o): p for o, p in zip(owners, own, strict=True)})
        for own in copies
    ]
    threads = [
        ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        for _ in range(replicas)
    ]

    def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        (F.mse_loss(model(x), y) * (len(x) / ROWS)).backward()

    def step() -> None:
        optimizer.zero_grad()
        total: list[torch.Tensor] = []
        for thread, model, own, (x, y) in zip(
            threads, models, copies, pieces(batch, replicas), strict=True
        ):
            thread.submit(backward, model, x, y).result()
            gradients = [p.grad for p in own if p.grad is not None]
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = gradients
            for parameter in own:
                parameter.grad = None
        for owner, gradient in zip(owners, total, strict=True):
            owner.grad = gradient
        optimizer.step()

    return step


def copies_by_hand(make: Callable[[], Made], replicas: int, batch: Batch) -> Work:
    """Each piece has a copy of the model and an optimizer.

    All of them step on the sum of the gradients.
    """
    first, _ = make()
    models = [first, *(copy.deepcopy(first) for _ in range(1, replicas))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    parameters = [list(model.parameters()) for model in models]

    def step() -> None:
        for model, optimizer, (x, y) in zip(
            models, optimizers, pieces(batch, replicas), strict=True
        ):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) * (len(x) / ROWS)).backward()
        total = [p.grad for p in parameters[0] if p.grad is not None]
        for others in parameters[1:]:
            torch._foreach_add_(total, [p.grad for p in others if p.grad is not None])
        for others, optimizer in zip(parameters, optimizers, strict=True):
            for parameter, gradient in zip(others, total, strict=True):
                parameter.grad = gradient
            optimizer.step()

    return step


def inside(
    strategy: torchstrategy.Strategy,
    make: Callable[[], Made],
    batch: Batch,
    *,
    clips: bool = False,
) -> Work:
    """The whole step in each replica."""
    with strategy.scope():
        model, optimizer = make()

    def step(piece: Batch) -> None:
        x, y = piece
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    dealt = next(iter(strategy.experimental_distribute_dataset([batch])))
    return lambda: strategy.run(step, args=(dealt,))


def outside(
    strategy: torchstrategy.Strategy, make: Callable[[], Made], batch: Batch
) -> Work:
    """Forward and backward in each replica, and the optimizer's step after the run."""
    with strategy.scope():
        model, optimizer = make()

    def backward(piece: Batch) -> None:
        x, y = piece
        F.mse_loss(model(x), y).backward()

    dealt = next(iter(strategy.experimental_distribute_dataset([batch])))

    def step() -> None:
        optimizer.zero_grad()
        strategy.run(backward, args=(dealt,))
        optimizer.step()

    return step


def same_batch(rounds: int, replicas: int, width: int, modules: int = 100) -> list[Row]:
    """The same global batch, by hand and in replicas."""
    torch.manual_seed(1)
    batch = torch.randn(ROWS, width), torch.randn(ROWS, width)
    devices = ["cpu"] * replicas
    central, mirrored = (
        torchstrategy.CentralStorageStrategy(devices),
        torchstrategy.MirroredStrategy(devices),
    )

    def make() -> Made:
        return made(modules, width)

    works = {
        "by hand": (by_hand(make, replicas, batch), ()),
        "threads by hand": (threads_by_hand(make, replicas, batch), ("by hand",)),
        "Central, whole step": (inside(central, make, batch), ("by hand",)),
        "Central, optimizer outside": (outside(central, make, batch), ("by hand",)),
        "copies by hand": (copies_by_hand(make, replicas, batch), ()),
        "Mirrored, whole step": (inside(mirrored, make, batch), ("copies by hand",)),
        "Mirrored, optimizer outside": (
            outside(mirrored, make, batch),
            ("copies by hand",),
        ),
    }
    repeats = 1 if rounds == 1 else 3
    contenders = {
        name: Contender(
            timed(work, repeats, time.process_time),
            against,
            None if "by hand" in name else BAR,
        )
        for name, (work, against) in works.items()
    }
    return compared(
        f"{replicas} replicas, {modules} modules of {width}", contenders, rounds
    )


def overhead(rounds: int) -> Iterator[Row]:
    """Two, four and eight replicas of layers without cost, and four of larger ones."""
    for replicas, width in ((2, 64), (4, 64), (8, 64), (4, 256), (4, 1024)):
        yield from same_batch(
            rounds if width < 1024 else min(rounds, 5), replicas, width
        )


def growth(rounds: int) -> list[Row]:
    """What one more replica costs: a run of a function that does nothing."""

    def empty() -> None:
        return None

    contenders = {}
    for replicas in (2, 4, 8, 16, 32, 64):
        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * replicas)
        work = timed(
            lambda strategy=strategy: strategy.run(empty),
            3 if rounds == 1 else 30,
            time.process_time,
        )
        contenders[f"{replicas} replicas"] = Contender(
            work, ("2 replicas",) if replicas > 2 else ()
        )
    return compared("an empty function", contenders, rounds, "µs")


def clipping(rounds: int) -> Iterator[Row]:
    """What it costs to clip gradients in the step.

    Every read of a gradient is one of the whole batch.

    The layers are small, so that the reads are most of what is measured.
    """
    width = 16
    torch.manual_seed(1)
    batch = torch.randn(8, width), torch.randn(8, width)
    for parameters in (100, 400, 1600):

        def make(parameters: int = parameters) -> Made:
            # Every second module is a linear layer, with two parameters.
            return made(parameters, width)

        strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        works = {
            "the step": inside(strategy, make, batch),
            "with clip_grad_norm_": inside(strategy, make, batch, clips=True),
        }
        few = 1 if rounds == 1 else min(rounds, 7)
        yield from compared(
            f"2 replicas, {parameters} parameters",
            {
                name: Contender(
                    timed(work, 1, time.process_time),
                    () if name == "the step" else ("the step",),
                    bar,
                )
                for (name, work), bar in zip(works.items(), (None, 1.6), strict=True)
            },
            few,
        )


CONTESTS = (overhead, growth, clipping)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
