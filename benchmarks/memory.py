"""What replicas on one device take of its memory, beside plain PyTorch.

The model has 200 MB, each in a fresh process.

python benchmarks/memory.py [--rounds N] [--json FILE]

`distinct parameters` counts the storages that the replicas' parameters are in. The rest
is resident memory, without what was there before the model; the peak is the kernel's
own, so that none is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchstrategy
from contest import Contender, Row, hold, in_fresh_processes, left_out, rows_of, work

WIDTH, LAYERS, ROWS = 2048, 12, 16
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WHAT = ("distinct parameters", "in a step, at most", "after the step")

CENTRAL, MIRRORED = "CentralStorageStrategy", "MirroredStrategy"
CONTENDERS = {
    "plain": ("", 1),
    **{f"Central, replicas: {n}": (CENTRAL, n) for n in (1, 2, 4, 8)},
    **{f"Mirrored, replicas: {n}": (MIRRORED, n) for n in (2, 4)},
}


def resident(which: str = "VmRSS") -> int:
    """The bytes of this process: now, or at most since `VmHWM` was reset."""
    lines = dict(line.split(":") for line in STATUS.read_text().splitlines())
    return 1024 * int(lines[which].split()[0])


def in_a_step(strategy: torchstrategy.Strategy, width: int, layers: int) -> list[int]:
    """What there is of `WHAT`, in bytes."""
    before = resident()
    with strategy.scope():
        torch.manual_seed(0)
        net = nn.Sequential(
            *[nn.Linear(width, width, bias=False) for _ in range(layers)]
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    (batch,) = strategy.experimental_distribute_dataset([torch.randn(ROWS, width)])

    def step(x: torch.Tensor) -> set[tuple[int, int]]:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        storages = [parameter.untyped_storage() for parameter in net.parameters()]
        return {(storage.data_ptr(), storage.nbytes()) for storage in storages}

    CLEAR.write_text("5")  # forgets the peak
    of_all = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
    parameters = sum(size for _, size in set().union(*of_all))
    return [parameters, resident("VmHWM") - before, resident() - before]


def worker(argument: Any) -> list[int]:
    """The figures of one contender."""
    kind, replicas = argument
    torch.set_num_threads(1)
    strategy = (
        getattr(torchstrategy, kind)(["cpu"] * replicas)
        if kind
        else torchstrategy.get_strategy()
    )
    in_a_step(strategy, 64, 2)  # loads what torch loads at its first use
    return in_a_step(strategy, WIDTH, LAYERS)


def on_one_device(rounds: int) -> Iterator[Row]:
    """Parameters, and gradients during a step and after it."""
    if not CLEAR.exists():
        left_out("memory", "there is no /proc")
        return
    names = list(CONTENDERS) if rounds > 1 else ["plain", "Central, replicas: 2"]
    figures = {
        name: in_fresh_processes(__file__, [CONTENDERS[name]])[0] for name in names
    }
    for i, what in enumerate(WHAT):
        contenders = {
            name: Contender(
                lambda: 0.0,
                () if name == "plain" else ("plain",),
                1.0 if what == WHAT[0] and name.startswith("Central") else None,
            )
            for name in names
        }
        yield from rows_of(
            what, contenders, [{name: float(figures[name][i]) for name in names}], "MB"
        )


CONTESTS = (on_one_device,)

if __name__ == "__main__":
    work(worker)
    hold(CONTESTS, __doc__ or "")
