"""A training script as plain PyTorch and a strategy run it, and all of them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import torchstrategy
from problems import data, mlp, mse, sgd

ROWS = (7, 4, 1)  # three replicas get 3, 3, 1; then 2, 2, 0; then 1, 0, 0
F64: dict[str, Any] = {"dtype": torch.float64}
STATEFUL = (
    nn.Module,
    torch.optim.Optimizer,
    lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


class Training:
    """A training script. Features are subclasses, each with what is its own.

    Its step is a bound method, of an object that holds models and optimizers: what
    people call a trainer.
    """

    dtype = torch.float64
    tolerance = 1e-10
    # That of the strategy.
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    options: torchstrategy.RunOptions | None = None  # of the runs

    def __init__(self) -> None:
        self.noted: set[object] = set()
        self.model = self.build()
        self.optimizer = self.optimized(self.model)

    def build(self) -> Any:
        return mlp(self.dtype)

    def optimized(self, model: nn.Module) -> Any:
        return sgd(model)

    def batches(self) -> list[Any]:
        return [data(rows, self.dtype, seed=k) for k, rows in enumerate(ROWS)]

    def loss(self, batch: Any) -> torch.Tensor:
        return mse(self.model, batch)

    def backward(self, batch: Any, k: int) -> Any:
        self.optimizer.zero_grad()
        self.loss(batch).backward()

    def update(self, k: int) -> None:
        self.optimizer.step()

    def step(self, batch: Any, k: int) -> None:
        """What plain PyTorch does with a batch, and what a strategy runs."""
        self.backward(batch, k)
        self.update(k)

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        """The same with the update after the run."""
        strategy.run(self.backward, args=(batch, k), options=self.options)
        self.update(k)

    def between(self, k: int) -> None:
        """What is done before each step, outside of replicas."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """What the caller wears."""
        return contextlib.nullcontext()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def state(self) -> dict[str, Any]:
        """All that is compared, by the path to it."""
        held = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, STATEFUL)
        }
        state = {"noted": sorted(map(str, self.noted))}
        for name, value in held.items():
            state.update(_leaves(name, value.state_dict()))
            if isinstance(value, nn.Module):
                state.update(
                    (f"{name}, {path}.grad", _kept(p.grad))
                    for path, p in value.named_parameters()
                )
        return state


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return dict(_leaves("model", model.state_dict()))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}, {key}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}[{i}]", item)
    elif not callable(value):
        yield path, _kept(value)


def _kept(value: Any) -> Any:
    """A tensor as it is now, where it can be compared."""
    return (
        value.detach().to("cpu", copy=True).to_dense()
        if isinstance(value, torch.Tensor)
        else value
    )


FEATURES: dict[str, Callable[[], Training]] = {}
SLOW: set[str] = set()
ALIKE: set[str] = set()  # what differs little from others


def feature(cls: type[Training]) -> type[Training]:
    """Adds a feature to the matrix, under the name of its class: `gradient_penalty`."""
    FEATURES[_name(cls)] = cls
    return cls


def alike(cls: type[Training]) -> type[Training]:
    """Adds a feature that differs little from others."""
    ALIKE.add(_name(cls))
    return feature(cls)


def _name(cls: type[Training]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def family(
    name: str, cls: Callable[[Any], Training], members: Mapping[str, Any]
) -> None:
    """Adds a feature for each member of a family."""
    names = [f"{name}_{member}" for member in members]
    FEATURES.update(
        zip(
            names,
            (functools.partial(cls, value) for value in members.values()),
            strict=True,
        )
    )
    ALIKE.update(names[1:])
