"""A whole trainer in plain PyTorch, with all that trainers usually have.

It has mixed precision, accumulation, warm-up, clipping, a moving average and
checkpoints.

trainer.py is the same program under a strategy. To see all that changes:

    diff examples/trainer_plain.py examples/trainer.py
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

import digits_problem
import trainer_problem as problem


class Trainer:
    """Trains a network on digits.

    A checkpoint has all that changes in the course of the training.
    """

    def __init__(self, options: Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.loader, self.test_loader = problem.loaders(options)
        self.build()
        self.log = problem.Log(options)
        self.losses: list[Tensor] = []
        self.epoch = 0

    def build(self) -> None:
        updates = self.options.epochs * -(-len(self.loader) // self.options.accumulate)
        self.model = digits_problem.Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-6)
        warm_up = lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5)
        cosine = lr_scheduler.CosineAnnealingLR(self.optimizer, updates - 5)
        self.scheduler = lr_scheduler.SequentialLR(
            self.optimizer, [warm_up, cosine], [5]
        )
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=self.options.precision != "float64"
        )
        self.average = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def backward(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        with problem.autocast(self.options):
            loss = F.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss / self.options.accumulate).backward()
        return loss.detach()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.average.update_parameters(self.model)

    @torch.no_grad()
    def count_right(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return (self.average(images).argmax(1) == labels).sum()

    def train_epoch(self) -> None:
        for number, batch in enumerate(
            digits_problem.progress(self.loader, self.epoch), 1
        ):
            self.losses.append(self.backward(batch))
            if number % self.options.accumulate == 0 or number == len(self.loader):
                self.update()

    def validate(self) -> float:
        right = 0
        for batch in self.test_loader:
            right += self.count_right(batch).item()
        return right / len(self.test_loader.dataset)

    def fit(self, epochs: int) -> None:
        """Trains until that many epochs are done, with a checkpoint after each."""
        while self.epoch < epochs:
            self.train_epoch()
            self.epoch += 1
            self.log.write(
                self.epoch, loss=self.losses[-1].item(), accuracy=self.validate()
            )
            self.save()

    def state_dict(self) -> dict[str, object]:
        names = ("model", "optimizer", "scheduler", "scaler", "average")
        parts = {name: getattr(self, name).state_dict() for name in names}
        return {
            **parts,
            "epoch": self.epoch,
            "losses": self.losses,
            "random": torch.get_rng_state(),
        }

    def save(self) -> None:
        problem.save(self.state_dict(), self.options.checkpoint)

    def load(self) -> None:
        state = torch.load(self.options.checkpoint)
        for name in ("model", "optimizer", "scheduler", "scaler", "average"):
            getattr(self, name).load_state_dict(state[name])
        self.epoch, self.losses = state["epoch"], state["losses"]
        torch.set_rng_state(state["random"])


if __name__ == "__main__":
    problem.main(Trainer, problem.argument_parser().parse_args())
