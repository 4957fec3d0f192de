"""Losses that need numbers of the whole batch are warned of.

Losses that are right by rows are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from topologies import central_in_one_place, mirrored
from torchstrategy import LossWeightWarning, RunOptions

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
SHARES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def classes(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.long, device=x.device)


def numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device)


def balance(net: Any, x: torch.Tensor) -> torch.Tensor:
    routes = net(x).softmax(1)
    chosen = F.one_hot(routes.argmax(1), 4).to(routes.dtype)
    return (chosen.mean(0) * routes.mean(0)).sum()


def entropy_of_mean(net: Any, x: torch.Tensor) -> torch.Tensor:
    mean = net(x).softmax(1).mean(0)
    return (mean * mean.log()).sum()


def penalty_of_gradients(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def rmse(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x), x).sqrt()


NEED: dict[str, tuple[Loss, str]] = {
    "root of a mean": (
        rmse,
        "takes the square root of a mean over the rows (`SqrtBackward0`)",
    ),
    "log of a mean": (
        lambda net, x: net(x).exp().mean().log(),
        "takes the logarithm of a mean over the rows",
    ),
    "focal, of the mean": (
        lambda net, x: (1 - (-F.mse_loss(net(x), x)).exp()) * F.mse_loss(net(x), x),
        "multiplies means over the rows",
    ),
    "norm": (
        lambda net, x: (net(x) - x).norm(),
        "takes the norm of numbers of several rows",
    ),
    "variance": (
        lambda net, x: F.relu(1 - net(x).var(0).sqrt()).mean(),
        "takes the variance of numbers of several",
    ),
    "entropy of a mean": (
        entropy_of_mean,
        "takes the logarithm of a mean over the rows",
    ),
    "distance of means": (
        lambda net, x: (net(x).mean(0) - x.mean(0)).square().sum(),
        "takes a power of a mean over the rows",
    ),
    "balance of experts": (balance, "multiplies two means over the rows"),
    "contrast": (
        lambda net, x: F.cross_entropy(net(x) @ net(x + 1).T, numbers(x)),
        "compares rows with one another (`MmBackward0`)",
    ),
}
RIGHT: dict[str, Loss] = {
    "root of each row": lambda net, x: (net(x) - x).square().mean(1).sqrt().mean(),
    "shares of classes": lambda net, x: (
        SHARES.to(x.device) * net(x).softmax(1).mean(0)
    ).sum(),
    "norms of weights": lambda net, x: (
        F.mse_loss(net(x), x) + sum(p.norm() for p in net.parameters())
    ),
    "norm of all weights": lambda net, x: (
        F.mse_loss(net(x), x) + sum(p.square().sum() for p in net.parameters()).sqrt()  # type: ignore[union-attr]
    ),
    "orthogonal weights": lambda net, x: (
        F.mse_loss(net(x), x) + (net[0].weight.T @ net[0].weight).square().sum()
    ),
    "loop over rows": lambda net, x: (
        sum(F.mse_loss(net(row), row).sqrt() for row in x) / len(x)
    ),
    "penalty of gradients": penalty_of_gradients,
    "learned uncertainty": lambda net, x: (
        F.mse_loss(net(x), x) * (-net[0].bias[0]).exp() + net[0].bias[0]
    ),
    "fixed classes": lambda net, x: F.cross_entropy(
        net(x) @ SHARES.to(x.device).repeat(4, 1), classes(x)
    ),
    "tied weights": lambda net, x: F.cross_entropy(net(x) @ net[2].weight, classes(x)),
    "attention in each row": lambda net, x: (
        torch.bmm(net(x.unsqueeze(2) * x.unsqueeze(1)), x.unsqueeze(2)).square().mean()
    ),
    "time first": lambda net, x: (
        (net(torch.stack([x] * 14)).mean(0) - x).square().mean()
    ),
}
MAKERS: dict[str, Callable[[int], torchstrategy.Strategy]] = {
    "in one place": central_in_one_place,
    "mirrored": mirrored,
}


def warned(
    strategy: torchstrategy.Strategy,
    loss: Loss,
    options: RunOptions | None = None,
    runs: int = 2,
) -> list[str]:
    """What is warned of in some runs, each with 7 rows in each replica."""
    torch.manual_seed(0)
    with strategy.scope():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def step(x: torch.Tensor) -> None:
        loss(net, x).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(runs):
            rows = torch.randn(
                7 * strategy.num_replicas_in_sync, 4, dtype=torch.float64
            )
            (batch,) = strategy.experimental_distribute_dataset([rows])
            strategy.run(step, args=(batch,), options=options)
    return [str(one.message) for one in caught if one.category is LossWeightWarning]


BY_LOSS = RunOptions(gradient_reduction="loss")


@pytest.mark.parametrize("options", [None, BY_LOSS], ids=["by default", "by loss"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", NEED)
def test_a_loss_that_needs_the_whole_batch_is_warned_of_once(
    name: str, maker: str, options: RunOptions | None
) -> None:
    """The balance of Mixtral's experts and the loss of CLIP were off by percents.

    Nothing said so.
    """
    loss, words = NEED[name]
    told = warned(MAKERS[maker](2), loss, options, runs=3)
    # By loss, what cannot be read is said in any case.
    assert len(told) == 1 and (
        words in told[0] or (options is BY_LOSS and "cannot be read" in told[0])
    ), told


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_right_by_rows_is_not_warned_of(name: str, maker: str) -> None:
    assert warned(MAKERS[maker](2), RIGHT[name], runs=4) == []


def test_one_that_says_how_replicas_count_is_not_warned() -> None:
    assert (
        warned(central_in_one_place(2), rmse, RunOptions(gradient_reduction="mean"))
        == []
    )


def test_a_loss_of_what_was_collected_is_not_warned_of(
    in_one_place: torchstrategy.Strategy,
) -> None:
    def collected(net: Any, x: torch.Tensor) -> torch.Tensor:
        context = torchstrategy.get_replica_context()
        assert context is not None
        squares, count = context.all_reduce(
            "sum", [(net(x) - x).square().sum(), x.numel()]
        )
        return (squares / count).sqrt()  # type: ignore[no-any-return]

    def contrast(net: Any, x: torch.Tensor) -> torch.Tensor:
        context = torchstrategy.get_replica_context()
        assert context is not None
        of_all = context.all_gather(net(x), axis=0)
        return F.cross_entropy(net(x) @ of_all.T, numbers(x))

    assert warned(in_one_place, collected) == []
    assert warned(in_one_place, contrast) == []


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_tell_nothing(rows: int) -> None:
    """A term of one row may be one of a loop."""
    strategy = central_in_one_place(2)
    with strategy.scope():
        net = nn.Linear(4, 4).double()

    def step(x: torch.Tensor) -> None:
        sum(F.mse_loss(net(row), row).sqrt() for row in x).backward()  # type: ignore[union-attr]

    (batch,) = strategy.experimental_distribute_dataset(
        [torch.randn(2 * rows, 4, dtype=torch.float64)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step, args=(batch,))
