"""How often a program waits for a device in a warm step, in virtual time.

The program runs under each strategy and in plain PyTorch.

python benchmarks/waits.py [--json FILE]

Nothing is measured here: the waits are counted on simulated devices. Each family of
models is trained as it is, with clipped gradients, and in half precision with a
GradScaler, for which plain PyTorch waits, too: it asks the device whether gradients are
finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import torchstrategy
from contest import PREDICTED, Row, hold
from torchstrategy.testing import (
    VirtualTrace,
    run_ranks,
    simulate_devices,
    simulated_devices,
    virtual_time,
)

ROWS, WIDTH, WARM = 8, 16, 3
PLAIN, WORKERS = "plain PyTorch", "one replica a worker"
CHANGES = ("", "clipped", "scaled")

Step = Callable[[], Any]


class LongShortTerm(nn.Module):
    """Rows as sequences of four vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = (
            nn.LSTM(4, 8, num_layers=2, batch_first=True),
            nn.Linear(8, 1),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.recurrent(rows.view(-1, 4, 4))[0][:, -1])
        return out


class Words(nn.Module):
    """Rows as words, of which each has a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.head = nn.Embedding(32, 8), nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        words = rows.abs().mul(10).long().clamp(max=31)
        out: torch.Tensor = self.head(self.vectors(words).mean(1))
        return out


def perceptron() -> nn.Module:
    return nn.Sequential(
        *[
            part
            for _ in range(4)
            for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))
        ]
    )


def convolutions() -> nn.Module:
    parts: list[nn.Module] = [nn.Unflatten(1, (1, 4, 4))]
    for before in (1, 4, 4):
        parts += [nn.Conv2d(before, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(4 * WIDTH, 1))


def in_sync() -> nn.Module:
    return torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(convolutions())


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Unflatten(1, (4, 4)), encoder, nn.Flatten(), nn.Linear(WIDTH, 1)
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutions and batch norm": convolutions,
    "convolutions and SyncBatchNorm": in_sync,
    "LSTM": LongShortTerm,
    "transformer": transformer,
    "embedding": Words,
}


def strategies() -> dict[str, Callable[[], torchstrategy.Strategy]]:
    one, other = simulated_devices()[:2]
    return {
        "OneDevice": lambda: torchstrategy.OneDeviceStrategy(one),
        "Central, 2 replicas on 1 GPU": lambda: torchstrategy.CentralStorageStrategy(
            [one, one], one
        ),
        "Central, 2 GPUs": lambda: torchstrategy.CentralStorageStrategy(
            [one, other], one
        ),
        "Mirrored, 2 GPUs": lambda: torchstrategy.MirroredStrategy([one, other]),
    }


def stepping(
    family: str,
    change: str,
    strategy: torchstrategy.Strategy | None,
    device: torch.device,
) -> Step:
    """A training step of a model, to be called again and again."""
    torch.manual_seed(0)
    net = FAMILIES[family]().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if strategy is not None:
        strategy.distribute_module(net)
        strategy.distribute_optimizer(optimizer)
    scaler = torch.amp.GradScaler(
        device.type, enabled=change == "scaled", init_scale=1024.0
    )

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        with (
            torch.autocast(device.type, torch.float16)
            if change == "scaled"
            else contextlib.nullcontext()
        ):
            loss = net(rows).square().mean()
        scaler.scale(loss).backward()
        if change == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    rows = torch.randn(ROWS, WIDTH, device=device)
    if strategy is None:
        return lambda: step(rows)
    (dealt,) = strategy.experimental_distribute_dataset([rows])
    return lambda: strategy.run(step, args=(dealt,))


def waits_of(step: Step, trace: VirtualTrace, rank: int | None = None) -> list[str]:
    """Why the program, or a rank, waits in a warm step.

    It is once for each wait, for a device or for other ranks.
    """

    def until_now() -> list[str]:
        own = [
            one
            for one in trace.synchronizations
            if rank is None or one.host == f"rank {rank}"
        ]
        return [f"{one.where}: {one.why}" for one in own]

    for _ in range(WARM):
        step()
    before = len(until_now())
    step()
    return until_now()[before:]


def waits_in_process(family: str, change: str, way: str) -> list[str]:
    """Of plain PyTorch, or of a strategy that has all replicas in this process."""
    make = strategies().get(way)
    with virtual_time("H100") as trace:
        step = stepping(
            family, change, make() if make is not None else None, simulated_devices()[0]
        )
        return waits_of(step, trace)


def waits_in_workers(family: str, change: str) -> list[str]:
    """Of the rank that waits most often, in two workers with a replica each.

    They also wait for each other, on the CPU, while devices go on: each backward, and
    each layer of `SyncBatchNorm`, compares what the workers have.
    """
    found: dict[int, list[str]] = {}

    def main(rank: int, trace: VirtualTrace) -> None:
        torch.distributed.init_process_group("nccl")
        device = torch.device("sim", rank)
        step = stepping(
            family,
            change,
            torchstrategy.MultiWorkerMirroredStrategy(devices=[device]),
            device,
        )
        found[rank] = waits_of(step, trace, rank)

    with virtual_time("H100") as trace:
        run_ranks(main, 2, args=(trace,))
    return max(found.values(), key=len)


def by_whom(reasons: Sequence[str]) -> tuple[list[str], list[str]]:
    """The waits for a device, and those for other workers."""
    of_workers = [reason for reason in reasons if reason.endswith("of ranks")]
    return [reason for reason in reasons if reason not in of_workers], of_workers


def waits(family: str, change: str) -> dict[str, list[str]]:
    """Why the program waits in a warm step of a family of models.

    It is in plain PyTorch and in every other way.
    """
    found = {
        way: waits_in_process(family, change, way) for way in (PLAIN, *strategies())
    }
    return {**found, WORKERS: waits_in_workers(family, change)}


def counted(rounds: int) -> Iterator[Row]:
    """All families, each as it is, clipped and scaled.

    One round says what all would.
    """
    simulate_devices(2)
    for family in FAMILIES:
        for change in CHANGES:
            found = waits(family, change)
            name = ", ".join(filter(None, ("waits in a step", family, change)))
            for way, reasons in found.items():
                of_devices, of_workers = by_whom(reasons)
                yield Row(
                    name,
                    way,
                    len(of_devices),
                    "waits",
                    "",
                    1.0,
                    1.0,
                    1.0,
                    len(found[PLAIN]),
                )
                if of_workers:
                    yield Row(
                        name,
                        f"{way}: for other workers",
                        len(of_workers),
                        "waits",
                        "",
                        1.0,
                        1.0,
                        1.0,
                        None,
                    )


CONTESTS = (counted,)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "", header=PREDICTED)
