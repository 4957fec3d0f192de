"""A step that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import torchstrategy


def after_failure() -> list[str]:
    """A strategy that has failed says so, and another one works."""
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])

    def step() -> None:
        raise KeyError("step")

    told = []
    for _ in range(2):
        try:
            strategy.run(step)
        except (KeyError, torchstrategy.WorkerError) as error:
            told.append(f"{type(error).__name__}: {error}")
    again = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    total = again.reduce("sum", again.run(lambda: torch.ones(()) * 1), axis=None)
    return [*told, str(total.item())]


class InterruptedSampler(torch.utils.data.Sampler[int]):
    """Somebody presses Ctrl-C where worker 0 begins an epoch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt
        return iter(range(4))


def interrupted_where_an_epoch_begins() -> str:
    """What a worker hears.

    Worker 0 keeps all that it has until the others have heard.
    """
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    # With workers of its own, a loader draws the first indices when an epoch begins.
    loader: Any = torch.utils.data.DataLoader(
        torch.ones(4),
        sampler=InterruptedSampler(),
        num_workers=1,
        persistent_workers=True,
    )
    dataset = strategy.experimental_distribute_dataset(loader)
    try:
        for batch in dataset:
            strategy.run(lambda batch: batch.sum(), args=(batch,))
        strategy.barrier()
        told = "nothing"
    except (KeyboardInterrupt, torchstrategy.WorkerError) as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
    del dataset, strategy
    return told
