"""A mean over tokens that is divided by a constant.

It is the number of micro-batches, which may be that of the rows.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from topologies import central, mirrored
from torchstrategy import LossWeightWarning, RunOptions

BY_LOSS = RunOptions(gradient_reduction="loss")
ROWS = 4  # of each of two replicas


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * ROWS, 5, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (2 * ROWS, 5), generator=generator)
    labels[:ROWS, 1:] = -100  # of the first replica, one token of each row counts
    return x, labels


def over_tokens(
    model: nn.Module, x: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), labels)


def smoothed(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), labels, label_smoothing=0.1)


def masked(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    return (
        F.cross_entropy(model(x).transpose(1, 2), labels, reduction="none") * mask
    ).sum() / mask.sum()


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


def trained(
    strategy: torchstrategy.Strategy, loss: Any, factor: Any, options: RunOptions | None
) -> tuple[Any, int]:
    model = strategy.distribute_module(made())
    (own,) = strategy.experimental_distribute_dataset([batch()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(
            lambda x, labels: factor(loss(model, x, labels)).backward(),
            args=own,
            options=options,
        )
    told = sum(one.category is LossWeightWarning for one in caught)
    return [p.grad.cpu() for p in model.parameters()], told


FACTORS = {
    "divided": lambda loss: loss / ROWS,
    "multiplied": lambda loss: loss * (1 / ROWS),
    "by a tensor": lambda loss: loss / torch.tensor(float(ROWS), device=loss.device),
    "scaled by a tensor": lambda loss: (
        loss * torch.tensor(float(ROWS), device=loss.device)
    ),
}


@pytest.mark.parametrize("make", [central, mirrored])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("loss", [over_tokens, smoothed, masked])
def test_a_constant_may_be_the_number_of_rows_of_every_replica(
    make: Any, factor: str, loss: Any
) -> None:
    """Gradients were weighted by rows then.

    The division was taken for one that corrects the weights by hand.
    """
    actual, told = trained(make(2), loss, FACTORS[factor], BY_LOSS)
    assert not told
    model = made()
    FACTORS[factor](loss(model, *batch())).backward()
    torch.testing.assert_close(
        actual, [p.grad for p in model.parameters()], rtol=1e-11, atol=1e-14
    )
    _, told = trained(make(2), loss, FACTORS[factor], None)
    assert told == 1
