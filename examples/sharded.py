"""A small transformer whose blocks are sharded by FSDP2.

Each process has a part of each weight, and of Adam's state.

    torchrun --standalone --nproc-per-node 2 examples/sharded.py --check

The strategy splits the batches, and weighs gradients by rows: the last batch of an
epoch has 37 rows, of which two processes get 19 and 18. With --check every process also
trains the whole model in plain PyTorch, and the program fails unless both have the same
weights.

Each process writes its part of a checkpoint, and another number of processes can read
it. --stop 20 ends the training after step 20, as if the machine were taken away. The
same command without --stop goes on, with 2 processes or with 4:

    torchrun --standalone --nproc-per-node 2 examples/sharded.py --stop 20
    torchrun --standalone --nproc-per-node 4 examples/sharded.py --check
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

import digits_problem as problem
import torchstrategy


class Transformer(nn.Module):
    """Reads an image as a text of eight words, which are its rows.

    There is no dropout, which would draw another mask in each process: the step is that
    of one device.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Linear(8, width)
        self.places = nn.Parameter(0.02 * torch.randn(8, width))
        layers = (
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, batch_first=True
            )
            for _ in range(2)
        )
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.words(images.squeeze(1)) + self.places)
        return self.head(features.mean(1))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    training_rows, _ = problem.digits()
    return DataLoader(training_rows, batch_size=100, shuffle=True)


class Training:
    """All that changes in the course of the training.

    Args:
        strategy: How to train. None: as one device does, in plain PyTorch.
    """

    def __init__(
        self, strategy: torchstrategy.MultiWorkerMirroredStrategy | None
    ) -> None:
        torch.manual_seed(0)
        self.steps = 0
        self.epoch = 0
        if strategy is None:
            self.data: Any = loader()
            self.model: nn.Module = Transformer()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            return
        self.data = strategy.experimental_distribute_dataset(loader())
        with strategy.scope():
            self.model = Transformer()
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Writes a checkpoint, of which each process writes its part."""
        newest = folder / f"step-{self.steps:06}"
        weights, moments = get_state_dict(self.model, self.optimizer)
        if problem.is_first_process():
            newest.mkdir(parents=True, exist_ok=True)
            state = {
                "data": self.data.state_dict(),
                "steps": self.steps,
                "epoch": self.epoch,
            }
            # This state is the same in all processes.
            torch.save(state | {"random": torch.get_rng_state()}, newest / "rest.pt")
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=newest)

    def load(self, folder: Path) -> None:
        """Reads the newest checkpoint that is whole: `.metadata` is written last."""
        newest = max(file.parent for file in folder.glob("step-*/.metadata"))
        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=newest)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
        )
        rest = torch.load(newest / "rest.pt")
        self.data.load_state_dict(rest["data"])
        torch.set_rng_state(rest["random"])
        self.steps, self.epoch = rest["steps"], rest["epoch"]


def train(
    strategy: torchstrategy.MultiWorkerMirroredStrategy, options: argparse.Namespace
) -> Training:
    training = Training(strategy)
    if any(options.checkpoints.glob("step-*/.metadata")):
        training.load(options.checkpoints)
        say(f"the training goes on after step {training.steps}")
    while training.epoch < options.epochs:
        for batch in training.data:
            strategy.run(training.step, args=(batch,))
            training.steps += 1
            if training.steps % options.every == 0:
                training.save(options.checkpoints)
            if training.steps == options.stop:
                say(f"the training stops after step {training.steps}")
                sys.exit()
        training.epoch += 1
    return training


def train_plainly(options: argparse.Namespace) -> nn.Module:
    training = Training(None)
    for _ in range(options.epochs):
        for batch in training.data:
            training.step(batch)
    return training.model


def say(text: str) -> None:
    if problem.is_first_process():
        print(text, flush=True)


def check(model: nn.Module, plain: nn.Module) -> None:
    """Exits with an error unless the weights of the two agree, but for rounding."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if problem.is_first_process():  # the others get no whole weights
        distance = problem.distance(whole.values(), plain.state_dict().values())
        say(f"largest difference from plain PyTorch: {distance:.1e}")
        if not distance < 1e-9:  # written like this, so that a NaN fails
            sys.exit("the weights are not those of plain PyTorch")


def main(options: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    model = train(strategy, options).model
    accuracy = problem.accuracy(model.eval())
    say(f"test accuracy {100 * accuracy:.1f} %")
    if options.check:
        check(model, train_plainly(options))
    if strategy.extended.should_checkpoint:
        # The next training is not to go on from here.
        shutil.rmtree(options.checkpoints, ignore_errors=True)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--epochs",
        type=problem.positive,
        default=3,
        help="default: 3, of 15 steps each",
    )
    parser.add_argument(
        "--every",
        type=problem.positive,
        default=7,
        help="steps from checkpoint to checkpoint; default: 7",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default="sharded",
        help="a folder all processes see; default: sharded",
    )
    parser.add_argument(
        "--stop",
        type=problem.positive,
        help="the step after which the program ends; default: none",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train in plain PyTorch, and fail if the two differ",
    )
    return parser


if __name__ == "__main__":
    main(argument_parser().parse_args())
