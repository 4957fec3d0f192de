"""torch.compile, of each part of a script."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from features.training import ALIKE, F64, FEATURES, SLOW, Training, family
from problems import mse


class _Net(nn.Module):
    """A class of one's own: dynamo leaves forwards of torch's own containers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, **F64), nn.Linear(4, 2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Uncompiled(Training):
    def build(self) -> nn.Module:
        return _Net()

    def update(self, k: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        super().update(k)


class Compiled(Uncompiled):
    """The model, the loss or what a replica does is compiled.

    `eager` runs the graphs that dynamo finds as they are.
    """

    def __init__(self, how: str, backend: Any = "eager") -> None:
        super().__init__()
        self.run_model = self.model
        if how == "model":
            self.run_model = torch.compile(self.model, backend=backend)
        elif how == "in_place":
            self.model.compile(backend=backend)
        else:
            setattr(self, how, torch.compile(getattr(self, how), backend=backend))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse(self.run_model, batch)


class CompiledAndAccumulated(Compiled):
    """Another size in the middle of a step is another graph.

    The compiler looks at gradients that are there already.
    """

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        for x, y in zip(batch[0].split(2), batch[1].split(2), strict=True):
            (self.loss((x, y)) * len(x) / len(batch[0])).backward()


COMPILED = ("model", "in_place", "loss", "backward", "step")
# torch itself warns of it.
family("compiled", Compiled, {how: how for how in COMPILED if how != "step"})
family(
    "compiled_with_backward",
    functools.partial(Compiled, backend="aot_eager"),
    {"model": "model"},
)
family(
    "compiled_and_accumulated",
    CompiledAndAccumulated,
    {how: how for how in ("model", "loss")},
)
SLOW.update(name for name in FEATURES if name.startswith("compiled"))
ALIKE.update(SLOW)
