"""The trainer."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from torchstrategy import Strategy

Batch = tuple[Tensor, Tensor]


class Trainer:
    """Fits a model to batches of inputs and targets, under a strategy."""

    def __init__(
        self, build_model: Callable[[], nn.Module], strategy: Strategy, lr: float = 0.1
    ) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = build_model()
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), lr=lr, momentum=0.9
            )

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each row."""
        inputs, targets = batch
        return (self.model(inputs) - targets).square().mean(1)

    def train_step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        losses = self.losses(batch)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return losses.detach()

    def fit(self, loader: Iterable[Batch], epochs: int = 1) -> list[float]:
        """Trains, and returns the mean loss of the last batch of each epoch."""
        history = []
        for _ in range(epochs):
            for batch in self.strategy.experimental_distribute_dataset(loader):
                losses = self.strategy.run(self.train_step, args=(batch,))
            history.append(float(self.strategy.reduce("mean", losses, axis=0)))
        return history

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the same, whatever it was trained on."""
        return {name: value.cpu() for name, value in self.model.state_dict().items()}
