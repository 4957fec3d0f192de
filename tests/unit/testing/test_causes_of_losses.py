"""`assert_same_as_plain` names losses that are means over something else.

Over tokens, class weights or masks, and what to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from problems import replica_id
from torchstrategy import RunOptions
from torchstrategy.testing import assert_same_as_plain

TOKENS, CLASSES, IGNORED = 6, 4, -100
# By batch, how many tokens of each row count: of two replicas, the second has fewer
# rows, and in one batch no tokens.
VALID = ((6, 6, 5, 6, 1, 1, 2), (6, 2, 4, 0, 0), (3, 6, 1))
Loss = Callable[[nn.Module, Any], torch.Tensor]


def batch_of(valid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(valid))
    x = torch.randn(len(valid), TOKENS, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (len(valid), TOKENS), generator=generator)
    labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = IGNORED
    return x, labels


BATCHES = list(map(batch_of, VALID))
BY_LOSS = RunOptions(gradient_reduction="loss")


def tagger() -> nn.Module:
    return nn.Linear(3, CLASSES, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def central(replicas: int, **kwargs: Any) -> torchstrategy.Strategy:
    return torchstrategy.CentralStorageStrategy(["cpu"] * replicas, **kwargs)


def trained_by(loss: Loss) -> Callable[[Any, Any, Any], Any]:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def failure(loss: Loss, options: RunOptions | None = None, **kwargs: Any) -> str:
    strategy = kwargs.pop("strategy", None) or central(2)
    with pytest.raises(AssertionError) as caught:
        assert_same_as_plain(
            trained_by(loss), tagger, sgd, BATCHES, strategy, options=options, **kwargs
        )
    return " ".join(str(caught.value).split())


def flat(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]).flatten(0, 1), batch[1].flatten()


def over_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(*flat(model, batch), ignore_index=IGNORED)


def by_class(model: nn.Module, batch: Any) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    return F.cross_entropy(*flat(model, batch), weight=weights)


def masked(model: nn.Module, batch: Any) -> torch.Tensor:
    logits, labels = flat(model, batch)
    mask = labels != IGNORED
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


def selected(model: nn.Module, batch: Any) -> torch.Tensor:
    logits, labels = flat(model, batch)
    return F.cross_entropy(logits, labels, reduction="none")[labels != IGNORED].mean()


def smoothed(model: nn.Module, batch: Any) -> torch.Tensor:
    """Two terms, which count the same tokens."""
    return F.cross_entropy(
        *flat(model, batch), ignore_index=IGNORED, label_smoothing=0.1
    )


def with_a_mean_over_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    """Two terms, of which one counts tokens and the other one rows."""
    return over_tokens(model, batch) + model(batch[0]).square().mean()


def tokens(batch: Any) -> torch.Tensor:
    return (batch[1] != IGNORED).sum()


LOSSES = [over_tokens, by_class, masked, selected, smoothed]
OVER_TOKENS = (
    "Cause: The loss is a mean over tokens, or over what a mask or class weights leave "
    "of the rows: it was divided by 23 in replica 0 and by 4 in replica 1, which have "
    "4 and 3 rows ({}). But gradients are weighted by rows. With "
    "RunOptions(gradient_reduction='loss') gradients and parameters agree: run the "
    "step with that option, or make the strategy with it. Or say how much each replica "
    "counts, RunOptions(examples=lambda batch: ...), with what the loss is divided by."
)


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (over_tokens, "it leaves out ignored targets, or weighs classes"),
        (masked, "the step divides a sum by a tensor"),
        (selected, "it is a mean over elements that a mask or indices select"),
    ],
)
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_the_cause_has_the_counts_and_what_to_write(
    loss: Loss, how: str, reduction: str | None
) -> None:
    said = failure(loss, RunOptions(gradient_reduction=reduction))
    assert OVER_TOKENS.format(how) in said
    assert said.count("Cause:") == 1


@pytest.mark.parametrize("loss", [*LOSSES, with_a_mean_over_rows])
@pytest.mark.parametrize("replicas", [2, 3])
def test_every_such_loss_is_named(loss: Loss, replicas: int) -> None:
    assert "Cause: The loss is a mean over tokens, or" in failure(
        loss, strategy=central(replicas)
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_with_what_the_cause_says_to_write_it_is_the_same(
    loss: Loss, replicas: int
) -> None:
    """The loss that the step returns is averaged by what it was divided by, too."""
    step = trained_by(loss)
    assert_same_as_plain(step, tagger, sgd, BATCHES, central(replicas), options=BY_LOSS)
    assert_same_as_plain(
        step, tagger, sgd, BATCHES, central(replicas, gradient_reduction="loss")
    )
    if loss is not by_class:
        assert_same_as_plain(
            step, tagger, sgd, BATCHES, central(replicas, examples=tokens)
        )


def test_what_else_a_step_returns_is_a_mean_over_rows() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = trained_by(over_tokens)(model, optimizer, batch)
        return {"loss": loss, "first": batch[0][:, 0].mean(), "rows": len(batch[0])}

    assert_same_as_plain(step, tagger, sgd, BATCHES, central(2), options=BY_LOSS)


def test_a_wrong_number_is_told_from_a_wrong_reduction() -> None:
    """By what the user's function counts, gradients are off as well."""
    said = failure(over_tokens, RunOptions(examples=lambda batch: batch[1].numel() + 1))
    assert "But gradients are weighted by what examples= says." in said


def test_a_returned_mean_of_unlike_terms_is_named() -> None:
    said = failure(with_a_mean_over_rows, BY_LOSS)
    assert (
        "Cause: The gradients agree. What the step returns is averaged here by rows"
        in said
    )
    assert "ignore=['losses']" in said
    step = trained_by(with_a_mean_over_rows)
    assert_same_as_plain(
        step, tagger, sgd, BATCHES, central(2), options=BY_LOSS, ignore=["losses"]
    )


class Fused(torch.autograd.Function):
    """A loss with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = logits.detach().requires_grad_()
            loss = F.cross_entropy(inner, labels, ignore_index=IGNORED)
        ctx.gradient = (
            torch.autograd.grad(loss, inner)[0].nan_to_num()
            if (labels != IGNORED).any()
            else 0 * logits
        )
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.gradient, None


def fused(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = Fused.apply(*flat(model, batch))
    return loss


@pytest.mark.parametrize("options", [None, BY_LOSS], ids=["default", "loss"])
def test_a_loss_that_cannot_be_read_is_named_as_such(
    options: RunOptions | None,
) -> None:
    said = failure(fused, options)
    assert "the loss is not a mean in which each row counts the same" in said
    assert (
        "What it is divided by cannot be read from its graph (`FusedBackward`). Say "
        "how much each replica" in said
    )
    assert "RunOptions(examples=lambda batch: ...)" in said
    assert_same_as_plain(
        trained_by(fused),
        tagger,
        sgd,
        BATCHES,
        central(2),
        options=RunOptions(examples=tokens),
    )


def test_a_loss_over_tokens_hides_no_other_cause() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return over_tokens(model, batch) * (1 + replica_id())

    said = failure(loss)
    assert "Cause: The loss is a mean over tokens" not in said


def test_means_over_rows_are_not_named() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean() * (1 + replica_id())

    assert "tokens" not in failure(loss)
