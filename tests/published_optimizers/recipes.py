"""Which classes there are, and how each is made and takes a step."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

PACKAGES = ("torch_optimizer", "pytorch_optimizer")
LR = 0.01
STEPS_OF_EACH = 12  # some begin to move after ten
ROWS = [3, 2]  # of each of two replicas

Make = Callable[[Any, list[nn.Parameter]], Optimizer]
Loss = Callable[[], torch.Tensor]
Backward = Callable[[nn.Module, Optimizer, torch.Tensor], torch.Tensor]

MAKES: dict[str, Make] = {
    "a learning rate alone": lambda cls, parameters: cls(parameters, lr=LR),
    "its own settings": lambda cls, parameters: cls(parameters),
    "around SGD": lambda cls, parameters: cls(SGD(parameters, lr=LR, momentum=0.9)),
    "with SGD inside": lambda cls, parameters: cls(
        parameters, base_optimizer=SGD, lr=LR
    ),
}


def _step(optimizer: Optimizer, backward: Loss) -> None:
    backward()
    optimizer.step()


def _with_closure(optimizer: Optimizer, backward: Loss) -> None:
    optimizer.step(backward)


def _with_both(optimizer: Optimizer, backward: Loss) -> None:
    backward()
    optimizer.step(backward)


def _twice(optimizer: Any, backward: Loss) -> None:
    backward()
    optimizer.first_step(zero_grad=True)
    backward()
    optimizer.second_step(zero_grad=True)


STEPS: dict[str, Callable[[Any, Loss], None]] = {
    "step()": _step,
    "first_step(), second_step()": _twice,
    "backward(), step(closure)": _with_both,
    "step(closure)": _with_closure,
}


@dataclass(frozen=True)
class Recipe:
    """A class, how it is made and how it takes a step."""

    name: str
    cls: Any
    made: str
    stepped: str

    def make(self, model: nn.Module) -> Any:
        """An optimizer of a model."""
        return MAKES[self.made](self.cls, list(model.parameters()))

    def step(self, optimizer: Any, backward: Loss) -> None:
        """Takes a step; `backward` makes the gradients anew, and returns the loss."""
        STEPS[self.stepped](optimizer, backward)

    def __str__(self) -> str:
        return f"{self.name} ({self.made}, {self.stepped})"


def classes() -> Iterator[tuple[str, Any]]:
    """Every class of optimizers in the packages that are installed, by name."""
    for package in PACKAGES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(package)
        for name, cls in sorted(vars(module).items()):
            if (
                inspect.isclass(cls)
                and issubclass(cls, Optimizer)
                and cls.__module__.startswith(package)
            ):
                yield f"{package}.{name}", cls


def recipes(names: Collection[str], closures: bool = False) -> list[Recipe]:
    """Recipes for the classes with which a small model trains in plain PyTorch.

    The others have none.

    Of a class that has a step without a closure, that; of one that works with another
    optimizer, or if `closures`, all.
    """
    return [
        recipe
        for name, cls in classes()
        if name in names
        for recipe in _that_train(name, cls, closures)
    ]


def _that_train(name: str, cls: Any, closures: bool) -> Iterator[Recipe]:
    for made in MAKES:
        found = (
            recipe
            for stepped in STEPS
            if _trains(recipe := Recipe(name, cls, made, stepped))
        )
        first = next(found, None)
        if first is not None:
            yield first
            if closures or "SGD" in made:
                yield from found
            return


def _trains(recipe: Recipe) -> bool:
    model = small_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_plainly(recipe, model)
    except Exception:
        return False
    after = list(model.parameters())
    are_finite = all(parameter.isfinite().all() for parameter in after)
    return are_finite and not all(map(torch.equal, before, after))


def backward(
    model: nn.Module, optimizer: Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    """What every script does before a step."""
    optimizer.zero_grad()
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    return loss.detach()


def backward_in_pieces(
    model: nn.Module, optimizer: Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    """The same, adding up the gradients of the rows of one replica and of the other."""
    optimizer.zero_grad()
    weights = [ROWS[0] / sum(ROWS), ROWS[1] / sum(ROWS)]
    losses = [(model(piece) - 1).square().mean() for piece in batch.split(ROWS)]
    parameters = list(model.parameters())
    columns = zip(
        *(torch.autograd.grad(loss, parameters) for loss in losses), strict=True
    )
    for parameter, (one, other) in zip(parameters, columns, strict=True):
        parameter.grad = (one * weights[0]).add(other, alpha=weights[1])
    return torch.stack(
        [loss.detach() * weight for loss, weight in zip(losses, weights, strict=True)]
    ).sum()


def seed() -> None:
    """Before an optimizer is made: some draw random numbers, of NumPy's, too."""
    torch.manual_seed(1)
    np.random.seed(1)


def train_plainly(
    recipe: Recipe, model: nn.Module, backward: Backward = backward
) -> Any:
    """Trains a model in plain PyTorch, and returns the optimizer."""
    seed()
    optimizer = recipe.make(model)
    for batch in batches():
        recipe.step(optimizer, functools.partial(backward, model, optimizer, batch))
    return optimizer


def small_model() -> nn.Module:
    """Smooth, so that no gradient is zero by chance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model.to(torch.float64)


def batches() -> Iterable[torch.Tensor]:
    """What is trained on."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(sum(ROWS), 3, generator=generator, dtype=torch.float64)
        for _ in range(STEPS_OF_EACH)
    ]
