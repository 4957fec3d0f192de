"""Losses that are computed outside of the step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from features.training import Training, alike, feature
from problems import context


@feature
class LossOutside(Training):
    """As with `nn.DataParallel`: replicas return outputs that require grad.

    The loss of all is outside.
    """

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        outputs = strategy.run(self.model, args=(batch[0],))
        self.optimizer.zero_grad()
        F.mse_loss(
            strategy.gather(outputs, axis=0), strategy.gather(batch[1], axis=0)
        ).backward()
        self.update(k)


@feature
class LossOfTheWholeBatch(Training):
    """Divided by what all replicas have together.

    That is the sum of the weights of the rows, of which many are zero.
    """

    def loss(self, batch: Any) -> torch.Tensor:
        losses = F.mse_loss(self.model(batch[0]), batch[1], reduction="none").mean(1)
        return torchstrategy.nn.compute_average_loss(
            losses, batch[0][:, 0].relu().detach()
        )


@alike
class LossOfTheWholeBatchSummed(LossOfTheWholeBatch):
    """The same where gradients are added up."""

    options = torchstrategy.RunOptions(gradient_reduction="sum")

    def update(self, k: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        super().update(k)


@feature
class LossWithCountedExamples(Training):
    """A mean over what weighs as much as the run is told.

    The step does not bring this together itself.
    """

    options = torchstrategy.RunOptions(
        examples=lambda batch, k: batch[0][:, 0].square().sum()
    )

    def loss(self, batch: Any) -> torch.Tensor:
        losses, weights = (
            F.mse_loss(self.model(batch[0]), batch[1], reduction="none"),
            batch[0][:, 0].square(),
        )
        return (losses.mean(1) * weights).sum() / weights.sum()


@feature
class LossWeighedByItself(Training):
    """The same mean: what it was divided by is read from its graph."""

    options = torchstrategy.RunOptions(gradient_reduction="loss")

    def loss(self, batch: Any) -> torch.Tensor:
        losses, weights = (
            F.mse_loss(self.model(batch[0]), batch[1], reduction="none"),
            batch[0][:, 0].square(),
        )
        return (losses.mean(1) * weights).sum() / weights.sum()


@feature
class LossOverPairsOfRows(Training):
    """As in contrastive learning: each row against those of all replicas.

    They know their own by its targets.
    """

    def loss(self, batch: Any) -> torch.Tensor:
        output, numbers = self.model(batch[0]), batch[1][:, 0]
        everybodys, all_numbers = context().all_gather((output, numbers), axis=0)
        own = (numbers.unsqueeze(1) == all_numbers).long().argmax(1)
        return F.cross_entropy(output @ everybodys.T, own)
