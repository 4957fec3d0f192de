"""What a step makes, replaces or hides: it works as in plain PyTorch, or is refused by name and nothing is done."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import torchstrategy
from features import SCHEDULERS
from problems import data, deal, mlp, mse, sgd

# ---- schedulers and scalers of the scope, wherever the step has them from


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class Trainer:
    """Has the trained objects two attributes away from what a step names."""

    def __init__(self, scheduler: Callable[[Any], Any] | None = None) -> None:
        model = mlp()
        optimizer = sgd(model)
        self.inside = types.SimpleNamespace(
            model=model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
            scheduler=None if scheduler is None else scheduler(optimizer),
        )


def trained(trainer: Trainer, run: Callable[[Callable[[Any], None], Any], object]) -> list[Any]:
    """The settings of its optimizer and its scale after each of four steps, and its weights at the end."""
    inside, states = trainer.inside, []
    args = (1.0,) if isinstance(inside.scheduler, lr_scheduler.ReduceLROnPlateau) else ()

    def step(batch: Any) -> None:
        trainer.inside.optimizer.zero_grad()
        trainer.inside.scaler.scale(mse(trainer.inside.model, batch)).backward()
        trainer.inside.scaler.step(trainer.inside.optimizer)
        trainer.inside.scaler.update()
        if trainer.inside.scheduler is not None:
            trainer.inside.scheduler.step(*args)

    for k in range(4):
        run(step, data(7, seed=k))
        group = inside.optimizer.param_groups[0]
        states.append([group["lr"], group["momentum"], inside.scaler.get_scale()])
    return [states, *(parameter.detach().cpu() for parameter in inside.model.parameters())]


@pytest.mark.parametrize("name", [*SCHEDULERS, "plateau", "none"])
def test_what_counts_steps_counts_each_once_if_it_was_created_in_the_scope_however_deep_it_is(
    make: Callable[[int], torchstrategy.Strategy], name: str
) -> None:
    scheduler = {**SCHEDULERS, "plateau": plateau, "none": None}[name]
    torch.manual_seed(0)
    plain = Trainer(scheduler)
    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        ours = Trainer(scheduler)
    expected, *weights = trained(plain, lambda step, batch: step(batch))
    states, *others = trained(ours, lambda step, batch: strategy.run(step, args=(deal(strategy, batch),)))
    assert states == expected
    torch.testing.assert_close(others, weights, rtol=1e-10, atol=1e-10)


def test_a_scheduler_that_runs_no_constructor_of_torchs_is_refused_where_a_run_does_not_see_it(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    class Halved(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, epoch: Any = None) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] /= 2

    strategy = make(2)
    with strategy.scope():
        trainer = Trainer(Halved)
    with pytest.raises(RuntimeError, match=r"Halved was stepped in a replica.*Create it in the scope, or name it"):
        strategy.run(lambda: trainer.inside.scheduler.step())
    scheduler = trainer.inside.scheduler
    strategy.run(lambda: scheduler.step())
    assert trainer.inside.optimizer.param_groups[0]["lr"] == 0.05


def test_a_scaler_that_is_copied_in_the_scope_is_known_and_one_that_is_dropped_is_freed(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    strategy = make(2)
    with strategy.scope():
        trainer = Trainer()
        first = weakref.ref(trainer.inside.scaler)
        trainer.inside.scaler = copy.deepcopy(trainer.inside.scaler)
    strategy.run(lambda: trainer.inside.scaler.update(32.0))
    gc.collect()
    assert first() is None and trainer.inside.scaler.get_scale() == 32.0


def test_constructors_are_torchs_own_again_when_the_scope_is_closed() -> None:
    kinds = (*{type(new(sgd(mlp()))) for new in (*SCHEDULERS.values(), plateau)}, torch.amp.GradScaler)
    before = [(kind.__init__, kind.__dict__.get("__setstate__")) for kind in kinds]
    with torchstrategy.CentralStorageStrategy(["cpu"] * 2).scope():
        assert torch.amp.GradScaler.__init__ is not before[-1][0]
    assert [(kind.__init__, kind.__dict__.get("__setstate__")) for kind in kinds] == before
