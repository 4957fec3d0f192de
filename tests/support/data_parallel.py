"""What tests of torchstrategy.DataParallel share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchstrategy
from problems import assert_close, deal, gradients, mlp
from topologies import compute_devices
from torchstrategy import DataParallel

FIRST = compute_devices(1)[0]
ROWS = torch.arange(8.0).view(4, 2)
F64: dict[str, Any] = {"dtype": torch.float64}


def parallel(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel:
    """The module on the first device, in a DataParallel on several."""
    return DataParallel(module.to(FIRST), compute_devices(replicas), **options)


def alike(
    build: Callable[[], nn.Module] = mlp, replicas: int = 3, **options: Any
) -> tuple[DataParallel, nn.Module]:
    """A module in a DataParallel, and an equal one that is in none."""
    torch.manual_seed(0)
    model = parallel(build(), replicas, **options)
    torch.manual_seed(0)
    return model, build().to(FIRST)


def here(*tensors: torch.Tensor) -> Any:
    """Tensors where plain PyTorch wants them."""
    moved = [tensor.to(FIRST) for tensor in tensors]
    return moved[0] if len(moved) == 1 else moved


def same_gradients(model: DataParallel, plain: nn.Module, case: str = "") -> None:
    assert_close(
        gradients(model.module), gradients(plain), f"gradient {case}", 1e-12, 1e-14
    )


class Calls(nn.Module):
    """A module with one parameter, whose forward is a function.

    It is one of the module and of its inputs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def returning(
    function: Callable[..., Any], replicas: int = 2, **options: Any
) -> Callable[..., Any]:
    """A DataParallel of a function of inputs."""
    return parallel(
        Calls(lambda module, *inputs, **kwargs: function(*inputs, **kwargs)),
        replicas,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Any
    hidden: Any = None


def outputs_of(
    strategy: torchstrategy.Strategy, module: nn.Module, x: torch.Tensor
) -> list[Any]:
    """What each replica returns for its rows."""
    results = strategy.run(module, args=(deal(strategy, x),))
    return list(strategy.experimental_local_results(results))
