"""A recipe under a strategy, compared with plain PyTorch."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import torchstrategy
from published_optimizers.recipes import (
    Backward,
    Recipe,
    backward,
    backward_in_pieces,
    batches,
    seed,
    small_model,
    train_plainly,
)

STRATEGIES: dict[str, Callable[[list[Any]], torchstrategy.Strategy]] = {
    "central": lambda devices: torchstrategy.CentralStorageStrategy(
        devices, devices[0]
    ),
    "mirrored": torchstrategy.MirroredStrategy,
}
PLACES = ("in the step", "after the run")


class Outcome(enum.Enum):
    EQUAL = "equal"
    DIFFERENT = "different"
    REFUSED = "refused"


class Trial(NamedTuple):
    """What came of a recipe under a strategy."""

    recipe: Recipe
    strategy: str
    place: str
    outcome: Outcome
    said: str = ""


def tried(recipe: Recipe, strategy: str, place: str, devices: list[Any]) -> Trial:
    """Trains under a strategy and in plain PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = dict(
                _numbers(*_train(recipe, STRATEGIES[strategy](devices), place))
            )
        except Exception as error:
            return Trial(
                recipe,
                strategy,
                place,
                Outcome.REFUSED,
                f"{type(error).__name__}: {error}",
            )
        plain = _plain(recipe, backward)
        difference = _difference(found, plain)
        if difference and _difference(
            in_pieces := _plain(recipe, backward_in_pieces), plain
        ):
            # The last bit of a gradient decides, in plain PyTorch as well.
            difference = _difference(found, in_pieces)
    return Trial(
        recipe,
        strategy,
        place,
        Outcome.DIFFERENT if difference else Outcome.EQUAL,
        difference,
    )


def _plain(recipe: Recipe, backward: Backward) -> dict[str, torch.Tensor]:
    model = small_model()
    return dict(_numbers(model, train_plainly(recipe, model, backward)))


def _train(
    recipe: Recipe, strategy: torchstrategy.Strategy, place: str
) -> tuple[nn.Module, Any]:
    with strategy.scope():
        model = small_model()
        seed()
        optimizer = recipe.make(model)

    def gradients(batch: torch.Tensor) -> torch.Tensor:
        return backward(model, optimizer, batch)

    def step(batch: torch.Tensor) -> None:
        recipe.step(optimizer, functools.partial(gradients, batch))

    for batch in strategy.experimental_distribute_dataset(batches()):
        if place == "in the step":
            strategy.run(step, args=(batch,))
        else:
            recipe.step(
                optimizer,
                functools.partial(_run_and_reduce, strategy, gradients, batch),
            )
    return model, optimizer


def _run_and_reduce(
    strategy: torchstrategy.Strategy, gradients: Any, batch: Any
) -> Any:
    return strategy.reduce("mean", strategy.run(gradients, args=(batch,)), axis=None)


def _numbers(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict().items()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # By parameter as a rule; some have a name for all of them, and others.
    for key, state in optimizer.state.items():
        for inner, value in state.items() if isinstance(state, dict) else [("", state)]:
            if isinstance(value, (torch.Tensor, int, float)):
                yield (
                    (
                        f"state of {names.get(id(key), key)}: "
                        f"{names.get(id(inner), inner)}"
                    ),
                    torch.as_tensor(value),
                )


def _difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> str:
    if found.keys() != expected.keys():
        return f"has {sorted(found.keys() ^ expected.keys())} or has it not"
    for name, value in expected.items():
        own = found[name].detach().cpu()
        if own.shape != value.shape or not torch.allclose(
            own, value, rtol=1e-7, atol=1e-9, equal_nan=True
        ):
            return (
                f"{name}: {own.flatten()[:3].tolist()} and plainly "
                f"{value.flatten()[:3].tolist()}"
            )
    return ""
