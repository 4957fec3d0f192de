"""Gradients that the step reads, writes, clears and accumulates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchstrategy
from features.autograd import signed
from features.training import F64, Training, alike, family, feature


@feature
class ClippedByNorm(Training):
    def update(self, k: int) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.noted.add(f"{k}: {float(norm):.9f}")
        super().update(k)


@alike
class ClippedByValue(Training):
    def update(self, k: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        super().update(k)


@alike
class ClippedByGroup(Training):
    """Through the optimizer's groups, with a norm of its own for each layer."""

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.SGD(
            [{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1
        )

    def update(self, k: int) -> None:
        for group in self.optimizer.param_groups:
            norm = nn.utils.get_total_norm([p.grad for p in group["params"]])
            nn.utils.clip_grads_with_norm_(group["params"], 0.05, norm)
        super().update(k)


def _halved(p: Any) -> None:
    p.grad.mul_(0.5)


def _decayed(p: Any) -> None:
    p.grad = p.grad + 0.1 * p.detach()


def _added_in_place(p: Any) -> None:
    p.grad += 0.1


def _of_data(p: Any) -> None:
    p.grad.data.copy_(p.grad.data / (1 + p.grad.data.norm()))


def _with_the_same_noise(p: Any) -> None:
    p.grad.add_(
        torch.randn(
            p.shape,
            generator=torch.Generator().manual_seed(p.numel()),
            device="cpu",
            **F64,
        ).to(p.device)
    )


def _taken_away(p: Any) -> None:
    if p.dim() == 1:
        p.grad = None


class GradientsEdited(Training):
    def __init__(self, edit: Callable[[Any], None]) -> None:
        self._edit = edit
        super().__init__()

    def update(self, k: int) -> None:
        for p in self.model.parameters():
            self._edit(p)
        super().update(k)


EDITS = (
    _halved,
    _decayed,
    _added_in_place,
    signed,
    _of_data,
    _with_the_same_noise,
    _taken_away,
)
family("gradients", GradientsEdited, {edit.__name__.strip("_"): edit for edit in EDITS})


class Cleared(Training):
    """Gradients are cleared by other ways than the optimizer's.

    It happens before backward or after the update.
    """

    def __init__(self, clear: Callable[[Any], None], first: bool) -> None:
        self._clear, self._first = clear, first
        super().__init__()

    def backward(self, batch: Any, k: int) -> None:
        if self._first:
            self._clear(self)
        self.loss(batch).backward()

    def update(self, k: int) -> None:
        super().update(k)
        if not self._first:
            self._clear(self)


def _none_each(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = None


def _zero_each(training: Training) -> None:
    for p in training.model.parameters():
        p.grad.zero_()


CLEARED_FIRST: dict[str, Callable[[Any], None]] = {
    "each_to_none": _none_each,
    "optimizer_to_zeros": lambda training: training.optimizer.zero_grad(
        set_to_none=False
    ),
    "model": lambda training: training.model.zero_grad(),
}
CLEARED_LAST: dict[str, Callable[[Any], None]] = {
    "each_to_zeros": _zero_each,
    "optimizer": lambda training: training.optimizer.zero_grad(),
    "model_to_zeros": lambda training: training.model.zero_grad(set_to_none=False),
}
family("cleared_first", functools.partial(Cleared, first=True), CLEARED_FIRST)
family("cleared_last", functools.partial(Cleared, first=False), CLEARED_LAST)


@feature
class AccumulatedOverRuns(Training):
    def backward(self, batch: Any, k: int) -> None:
        (self.loss(batch) / 2).backward()

    def update(self, k: int) -> None:
        if k % 2:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()


@feature
class AccumulatedInTheStep(Training):
    """Micro-batches of one row, each weighing one of the rows dealt to the replica."""

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        rows = len(batch[0])
        for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
            (self.loss((x, y)) / rows).backward()


@alike
class SeveralLosses(Training):
    """Two backward calls of two losses, of which one has a regulariser."""

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        sum(p.square().sum() for p in self.model.parameters()).mul(0.01).backward()


@feature
class SeveralUpdates(Training):
    """In one step, each seen by the forward after it."""

    def step(self, batch: Any, k: int) -> None:
        super().step(batch, k)
        super().step(batch, k)

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        super().outside(strategy, batch, k)
        super().outside(strategy, batch, k)
