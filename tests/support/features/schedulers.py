"""Schedulers, and averages of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import torchstrategy
from features.training import Training, family, feature
from problems import context


class Scheduled(Training):
    def __init__(self, new: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scheduler = new(self.optimizer)

    def update(self, k: int) -> None:
        super().update(k)
        self.scheduler.step()
        self.noted.add(
            (k, self.scheduler.get_last_lr()[0], self.optimizer.param_groups[0]["lr"])
        )


def _sequential(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(
        optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2]
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    # Cycles the momentum too.
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "sequential": _sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            lr_scheduler.ExponentialLR(o, 0.9),
        ]
    ),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}
family("scheduler", Scheduled, SCHEDULERS)


@feature
class SchedulerOnAPlateau(Training):
    """It is told the loss of the whole batch.

    In the step that takes an all_reduce, or it would be refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=0.5, patience=0
        )

    def backward(self, batch: Any, k: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        losses = F.mse_loss(self.model(batch[0]), batch[1], reduction="none").mean(1)
        losses.mean().backward()
        return losses.detach()

    def step(self, batch: Any, k: int) -> None:
        losses = self.backward(batch, k)
        self.optimizer.step()
        total, rows = context().all_reduce("sum", (losses.sum(), len(losses)))
        self.scheduler.step(float(total / rows))

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        losses = strategy.run(self.backward, args=(batch, k))
        self.optimizer.step()
        self.scheduler.step(float(strategy.reduce("mean", losses, axis=0)))


@feature
class SchedulersOfTwoKinds(Training):
    """A warm-up in each step and a decay in every second one, on one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.schedulers = [
            lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3),
            lr_scheduler.StepLR(self.optimizer, 1, 0.5),
        ]
        self.first, self.second = self.schedulers

    def update(self, k: int) -> None:
        super().update(k)
        self.schedulers[0].step()
        if k % 2:
            self.schedulers[1].step()


class Averaged(Training):
    """A moving average of the weights: in a replica, a merge function writes it."""

    def __init__(self, average: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.average = average(self.model)

    def step(self, batch: Any, k: int) -> None:
        self.backward(batch, k)
        self.optimizer.step()
        context().merge_call(
            lambda strategy: self.average.update_parameters(self.model)
        )

    def update(self, k: int) -> None:
        super().update(k)
        self.average.update_parameters(self.model)


family(
    "averaged",
    Averaged,
    {
        "swa": lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_swa_avg_fn()),
        "ema": lambda m: swa_utils.AveragedModel(
            m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
        ),
        "ema_with_buffers": lambda m: swa_utils.AveragedModel(
            m, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True
        ),
    },
)
