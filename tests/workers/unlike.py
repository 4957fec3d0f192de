"""Trainings in which one of two workers does something else than the other one."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

import torchstrategy
from workers.exact_steps import large_from
from workers.trainings import strategy_of

FROM = 3  # the run from which on worker 1 goes its own way


class Models:
    """Two models with an optimizer each, and what one worker does otherwise.

    Args:
        what: What worker 1 does.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.strategy = strategy_of(1)
        self.worker = self.strategy.extended._workers.index
        torch.manual_seed(0)
        with self.strategy.scope():
            self.models = [
                nn.Sequential(
                    nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
                ).double()
                for _ in "ab"
            ]
            self.optimizers = [
                torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models
            ]
        self.index = 0

    @property
    def is_other(self) -> bool:
        return self.worker == 1 and self.index >= FROM

    def loss(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return (self.models[k](x) - 1).square().mean()

    def step(self, x: torch.Tensor) -> None:
        for k in [1, 0] if self.is_other and self.what == "another order" else [0, 1]:
            self.optimizers[k].zero_grad()
            if not (self.is_other and self.what == "a missing backward" and k == 1):
                self.loss(k, x).backward()
            if self.is_other and self.what == "an extra backward" and k == 1:
                self.loss(k, x).backward()
            if self.what == "noise" and self.index >= FROM:
                for parameter in self.models[k].parameters():
                    parameter.grad.add_(
                        torch.full_like(parameter, 0.01 * (1 + self.worker))
                    )
            if self.is_other and self.what == "a message" and k == 0:
                torchstrategy.get_replica_context().all_reduce("sum", torch.ones(2))
            self.optimizers[k].step()

    def another_step(self, x: torch.Tensor) -> None:
        self.step(x)

    def prepare(self) -> None:
        """What the program does before a run."""
        weight = self.models[1][0].weight
        if not self.is_other or self.index != FROM:
            return
        if self.what == "a setting":
            self.optimizers[1].param_groups[0]["momentum"] = 0.5
        elif self.what == "a frozen parameter":
            weight.requires_grad_(False)
        elif self.what == "a mode":
            self.models[1].eval()
        elif self.what == "a checkpoint":
            self.models[1].load_state_dict(
                {name: value + 1 for name, value in self.models[1].state_dict().items()}
            )
        elif self.what == "a write that is not counted":
            weight.data.add_(0.5)
        elif self.what == "a write on a buffer":
            self.models[1][1].running_var.fill_(2.0)
        elif self.what == "another parameter":
            self.models[1][0].weight = nn.Parameter(weight.detach().clone())


def of_difference(what: str, size: float) -> tuple[str, int]:
    """What this worker is told, and in which run."""
    with large_from(size):
        made = Models(what)
        data = [
            torch.randn(
                8, 2, generator=torch.Generator().manual_seed(i), dtype=torch.float64
            )
            for i in range(30)
        ]
        batches = list(made.strategy.experimental_distribute_dataset(data))
        while made.index < len(batches):
            made.prepare()
            step = (
                made.another_step
                if made.is_other and what == "another step"
                else made.step
            )
            try:
                made.strategy.run(step, args=(batches[made.index],))
            except RuntimeError as error:
                return f"{type(error).__name__}: {error}", made.index
            made.index += 1
    return "", made.index


def of_refusal(what: str) -> str:
    """What all workers do that cannot work."""
    strategy = strategy_of(1)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outside = nn.Linear(2, 1)
    if what == "a parameter of nobody":
        optimizer.add_param_group({"params": outside.parameters()})
    elif what == "a tensor in an attribute":
        model.scale = torch.ones(1, requires_grad=True)
    elif what == "parameters that were replaced":
        model.weight, model.bias = (
            nn.Parameter(torch.ones(1, 2)),
            nn.Parameter(torch.ones(1)),
        )
    elif what == "a lazy module":
        with strategy.scope():
            model = nn.LazyLinear(1)
    told: list[str] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) + outside(torch.ones(1, 2))).sum()
        loss.backward(create_graph=what == "a loss of gradients")
        if what == "a loss of gradients":
            assert model.weight.grad is not None
            (model.weight.grad.square().sum()).backward()
        elif what == "an update on another thread":

            def update() -> None:
                try:
                    optimizer.step()
                except RuntimeError as error:
                    told.append(f"{type(error).__name__}: {error}")

            _in_thread(update)
        elif what == "a clipped gradient of its own":
            model.weight.grad = torch.full_like(
                model.weight, 1.0 + strategy.extended._workers.index
            )
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        elif what == "a sum with an earlier gradient":
            own = 1.0 + strategy.extended._workers.index
            model.weight.grad = torch.full_like(model.weight, own)
            optimizer.step()
        else:
            optimizer.step()

    def run() -> None:
        reduction = "sum" if what == "a sum with an earlier gradient" else None
        try:
            strategy.run(
                step, options=torchstrategy.RunOptions(gradient_reduction=reduction)
            )
        except (RuntimeError, TypeError) as error:
            told.append(f"{type(error).__name__}: {error}")

    if what == "a run on another thread":
        strategy.run(lambda: _in_thread(run))
    else:
        run()
    return told[0] if told else ""


def _in_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def of_backward_that_raises(size: float) -> tuple[str, list[float]]:
    """A backward raises in all workers, and the step goes on.

    Returns what comes of it, and the weights.
    """
    with large_from(size):
        made = Models("")

        def fail(gradient: Any) -> None:
            raise ValueError("too large")

        def step(x: torch.Tensor) -> None:
            made.optimizers[0].zero_grad()
            hidden = made.models[0][:2](x)
            if made.index == FROM:
                hidden.register_hook(fail)
            try:
                made.models[0][2](hidden).square().mean().backward()
            except ValueError:
                assert all(
                    parameter.grad is None for parameter in made.models[0].parameters()
                )
                return
            made.optimizers[0].step()

        try:
            for made.index in range(6):
                x = torch.randn(
                    4,
                    2,
                    generator=torch.Generator().manual_seed(made.index),
                    dtype=torch.float64,
                )
                made.strategy.run(step, args=(x,))
        except torchstrategy.WorkerError as error:
            return str(error), []
    return "", made.models[0][0].weight.flatten().tolist()
