"""Losses that are not a mean over rows, as docs/features.md says of them.

Gradients are those of plain PyTorch, in float64.

Each row of its table is run as the row says, and each snippet below the table.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from known_losses import Fused
from problems import deal
from torchstrategy import RunOptions

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

F64 = torch.float64
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)


def context() -> torchstrategy.ReplicaContext:
    found = torchstrategy.get_replica_context()
    assert found is not None
    return found


def all_reduce(*values: Any) -> Any:
    return context().all_reduce("sum", values)


def all_gather(*values: Any) -> Any:
    return context().all_gather(values, axis=0)


def rmse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    squares, count = all_reduce((outputs - targets).square().sum(), outputs.numel())
    return (squares / count).sqrt()


def dice_of(overlap: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return 1 - 2 * overlap / size


def dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inside = outputs.sigmoid()
    return dice_of(*all_reduce((inside * targets).sum(), (inside + targets).sum()))


def plain_dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inside = outputs.sigmoid()
    return dice_of((inside * targets).sum(), (inside + targets).sum())


def routes_of(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    routes = outputs.softmax(1)
    return routes, F.one_hot(routes.argmax(1), routes.shape[1]).to(routes.dtype)


def balance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    routes, chosen = routes_of(outputs)
    chosen_by_all, routed, count = all_reduce(chosen.sum(0), routes.sum(0), len(routes))
    return routes.shape[1] * (chosen_by_all / count * (routed / count)).sum()


def plain_balance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    routes, chosen = routes_of(outputs)
    return routes.shape[1] * (chosen.mean(0) * routes.mean(0)).sum()


def plain_info_nce(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        outputs @ targets.T, torch.arange(len(outputs), device=outputs.device)
    )


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    targets = targets.clamp(min=0)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return torchstrategy.nn.compute_average_loss(
        losses, WEIGHTS.to(outputs.device)[targets]
    )


def ignoring(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none", ignore_index=-100)
    return torchstrategy.nn.compute_average_loss(losses, targets != -100)


# What a step says, and what plain PyTorch says.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "rmse": (rmse, lambda outputs, targets: F.mse_loss(outputs, targets).sqrt()),
    "dice": (dice, plain_dice),
    "balance": (balance, plain_balance),
    "info_nce": (
        lambda outputs, targets: plain_info_nce(*all_gather(outputs, targets)),
        plain_info_nce,
    ),
    "class_weights": (
        weighted,
        lambda outputs, targets: F.cross_entropy(
            outputs, targets.clamp(min=0), WEIGHTS
        ),
    ),
    "ignore_index": (ignoring, F.cross_entropy),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [9, 5, 2])
def test_the_line_in_the_docs_is_plain_pytorch(
    strategy: torchstrategy.Strategy, name: str, rows: int
) -> None:
    """Replicas with different numbers of rows, and none.

    A loss over the rows of each is off by up to a half.
    """
    loss, plain = LOSSES[name]
    twin = nn.Linear(3, 4, dtype=F64)
    model = strategy.distribute_module(copy.deepcopy(twin))
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.rand(rows, 3, dtype=F64, generator=generator)
    marks = torch.rand(rows, 4, dtype=F64, generator=generator).round()
    classes = torch.tensor([0, 3, -100, 1, 1, -100, -100, 2, 3])[:rows]
    targets = classes if name in ("class_weights", "ignore_index") else marks

    strategy.run(
        lambda batch: loss(model(batch[0]), batch[1]).backward(),
        args=(deal(strategy, (inputs, targets)),),
    )
    plain(twin(inputs), targets).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-10, atol=1e-13)


# The table: for each kind of loss, some of that kind, as plain PyTorch has them


def compiled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _compiled(outputs, targets)
    return loss


_compiled = torch.compile(
    lambda outputs, targets: F.cross_entropy(outputs, targets), backend="aot_eager"
)


def weights(outputs: torch.Tensor) -> torch.Tensor:
    return WEIGHTS.to(outputs.device)


def masked(outputs: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    return (outputs.square() * marks).sum() / marks.sum()


def smoothed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, weights(outputs), label_smoothing=0.1)


def with_a_mean_over_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (
        F.cross_entropy(outputs, targets) + 0.1 * outputs.logsumexp(1).square().mean()
    )


def hinge(outputs: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    return (1 - outputs * marks).relu().mean(1).mean()


class Kind(NamedTuple):
    """Losses of one row of the table."""

    losses: list[tuple[Loss, Loss]]  # what the step computes, and plain PyTorch
    has_classes: bool = False


def of(*losses: Loss, has_classes: bool = False) -> Kind:
    """Losses that the step computes as plain PyTorch does."""
    return Kind([(loss, loss) for loss in losses], has_classes)


KINDS = {
    "a mean over rows": of(F.mse_loss, F.binary_cross_entropy_with_logits, hinge),
    "a mean over tokens": of(
        lambda outputs, targets: masked(
            outputs, (targets[:, None] % 2 == 0).to(outputs)
        ),
        F.cross_entropy,
        lambda outputs, targets: F.cross_entropy(outputs, targets, weights(outputs)),
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")[
            targets != -100
        ].mean(),
        has_classes=True,
    ),
    "a sum of such means": of(smoothed, with_a_mean_over_rows, has_classes=True),
    "a sum over rows": of(
        lambda outputs, marks: F.mse_loss(outputs, marks, reduction="sum")
    ),
    "compiled": of(compiled, Fused.apply, has_classes=True),
    "a function of a mean": Kind(
        [LOSSES[name] for name in ("rmse", "dice", "info_nce")]
    ),
}


def count(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


WRITTEN = {
    "nothing": None,
    '`gradient_reduction="loss"`': RunOptions(gradient_reduction="loss"),
    '`gradient_reduction="sum"`': RunOptions(gradient_reduction="sum"),
    "`examples=count`": RunOptions(examples=count),
    "the formula, from what `all_reduce` and `all_gather` collect": None,
}


def table() -> dict[str, str]:
    """Of each kind of loss, what to write."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "features.md").read_text()
    lines = text.partition("| the loss is | for example | write |\n|---|---|---|\n")[
        2
    ].partition("\n\n")[0]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines.splitlines()]
    return {row[0]: row[2] for row in rows}


def written_for(kind: str) -> RunOptions | None:
    (written,) = [what for said, what in table().items() if said.startswith(kind)]
    return WRITTEN[written]


def test_every_row_of_the_table_is_run() -> None:
    assert len(table()) == len(KINDS)
    assert all(sum(said.startswith(kind) for said in table()) == 1 for kind in KINDS)


# Torch's own, as it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [9, 5, 2])
def test_a_row_of_the_table_is_plain_pytorch(
    strategy: torchstrategy.Strategy, kind: str, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.rand(rows, 3, dtype=F64, generator=generator)
    marks = torch.rand(rows, 4, dtype=F64, generator=generator).round()
    # Of no two replicas with unlike numbers of rows do equal numbers count: those would
    # be taken for a constant.
    classes = torch.tensor([0, 3, 2, -100, 1, 1, -100, 3, 0])[:rows]
    targets = classes if KINDS[kind].has_classes else marks
    for loss, plain in KINDS[kind].losses:
        twin = nn.Linear(3, 4, dtype=F64)
        model = strategy.distribute_module(copy.deepcopy(twin))
        batch = deal(strategy, (inputs, targets))
        strategy.run(
            lambda batch, loss=loss, model=model: loss(
                model(batch[0]), batch[1]
            ).backward(),
            args=(batch,),
            options=written_for(kind),
        )
        plain(twin(inputs), targets).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(
                mine.grad.cpu(), theirs.grad, rtol=1e-10, atol=1e-13
            )
