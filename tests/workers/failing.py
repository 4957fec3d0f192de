"""A step that fails."""

from __future__ import annotations

import torch

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
