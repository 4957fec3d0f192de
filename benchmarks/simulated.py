"""What a simulated device costs, against the same on the CPU.

It is the time of operations and steps on `sim:0`.

And what virtual time and lints cost beyond that, for each operator.

python benchmarks/simulated.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy.testing
from contest import Contender, Row, Work, compared, hold, timed
from torchstrategy.testing import lint_training, virtual_time

SECONDS = 0.02  # of one round on the CPU, about


def add(size: int, device: str) -> Work:
    x, y = torch.rand(size, device=device), torch.rand(size, device=device)
    return lambda: x + y


def add_in_place(size: int, device: str) -> Work:
    x, y = torch.rand(size, device=device), torch.rand(size, device=device)
    return lambda: x.add_(y)


def mm(size: int, device: str) -> Work:
    x, y = torch.rand(size, size, device=device), torch.rand(size, size, device=device)
    return lambda: x @ y


def transpose(device: str) -> Work:
    x = torch.rand(8, 8, device=device)
    return lambda: x.t()


def item(device: str) -> Work:
    x = torch.rand((), device=device)
    return x.item


def gradient(model: nn.Module, x: torch.Tensor) -> Work:
    def step() -> None:
        model.zero_grad()
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()

    return step


def mlp(width: int, batch: int, device: str) -> Work:
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    ).to(device)
    return gradient(model, torch.rand(batch, width, device=device))


def convolutions(device: str) -> Work:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    ).to(device)
    return gradient(model, torch.rand(16, 3, 28, 28, device=device))


def transformer(device: str) -> Work:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(device)
    return gradient(model, torch.rand(8, 16, 64, device=device))


def lstm(device: str) -> Work:
    return gradient(nn.LSTM(16, 32).to(device), torch.rand(16, 8, 16, device=device))


def adam(way: dict[str, bool], device: str) -> Work:
    parameters = [nn.Parameter(torch.rand(32, 32, device=device)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    return torch.optim.Adam(parameters, **way).step


WORK: dict[str, Callable[[str], Work]] = {
    "`x + y`, 64 numbers": lambda device: add(64, device),
    "`x.add_(y)`, 64 numbers": lambda device: add_in_place(64, device),
    "`x + y`, 1,000,000 numbers": lambda device: add(1_000_000, device),
    "`x @ y`, 64 x 64": lambda device: mm(64, device),
    "`x @ y`, 512 x 512": lambda device: mm(512, device),
    "`x.t()`": transpose,
    "`x.item()`": item,
    "two layers of 16, batch of 8: forward and backward": lambda device: mlp(
        16, 8, device
    ),
    "two layers of 1,024, batch of 256: forward and backward": lambda device: mlp(
        1024, 256, device
    ),
    "two convolutions, 16 images: forward and backward": convolutions,
    "`TransformerEncoderLayer(64, 4, 128)`: forward and backward": transformer,
    "`LSTM(16, 32)`, 16 steps: forward and backward": lstm,
    "Adam, 20 parameters, on lists": lambda device: adam({"foreach": True}, device),
    "Adam, 20 parameters, in a loop": lambda device: adam({"foreach": False}, device),
    "Adam, 20 parameters, fused": lambda device: adam({"fused": True}, device),
}


def simulated(rounds: int) -> Iterator[Row]:
    """Each operation and step, on the CPU and on a simulated device."""
    torchstrategy.testing.simulate_devices(1)
    for name, make in WORK.items():
        on_cpu, on_sim = make("cpu"), make("sim:0")
        timed(on_cpu, 3)()
        repeats = max(1, int(SECONDS / max(timed(on_cpu, 3)(), 1e-7)))
        contenders = {
            "CPU": Contender(timed(on_cpu, repeats)),
            "simulated": Contender(timed(on_sim, repeats), ("CPU",)),
        }
        yield from compared(name, contenders, rounds, "µs")


WATCHED = (
    "`x + y`, 64 numbers",
    "`x.add_(y)`, 64 numbers",
    "`x @ y`, 64 x 64",
    "two layers of 16, batch of 8: forward and backward",
    "`TransformerEncoderLayer(64, 4, 128)`: forward and backward",
    "Adam, 20 parameters, in a loop",
)
# What these may cost beyond an operator of the simulation, which is 16 to 18 us on the
# machine of benchmarks/README.md.
BARS = {"in virtual time": 0.9, "under lint_training": 0.9}
BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "in virtual time": partial(virtual_time, "H100"),
    "under lint_training": lint_training,
}


class Counts(TorchDispatchMode):
    """Counts the operators that run, views included, as virtual time does."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def watched(rounds: int) -> Iterator[Row]:
    """What an operator costs in blocks that watch it, beyond a simulated device."""
    torchstrategy.testing.simulate_devices(1)
    for name in WATCHED:
        work = WORK[name]("sim:0")
        with Counts() as counts:
            work()
        count = counts.count
        repeats = max(1, 500 // count)

        def unwatched(
            work: Work = work, repeats: int = repeats, count: int = count
        ) -> float:
            # Of all threads: torch runs the backward of a device on another one.
            return timed(work, repeats, time.process_time)() / count

        def beyond(
            block: Callable[[], AbstractContextManager[Any]],
            unwatched: Callable[[], float],
        ) -> float:
            plain = unwatched()
            with block():
                return unwatched() - plain

        each = f"each of {count} operators" if count > 1 else "the operator"
        simulated_alone = f"{each}, simulated"
        contenders = {simulated_alone: Contender(unwatched)}
        for what, block in BLOCKS.items():
            measure = partial(beyond, block, unwatched)
            contenders[f"{each} {what}, beyond the simulation"] = Contender(
                measure, (simulated_alone,), BARS[what]
            )
        yield from compared(name, contenders, rounds, "µs")


CONTESTS = (simulated, watched)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
