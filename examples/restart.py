r"""A training that goes on after one of its processes was killed.

It ends with the weights of a training that nothing interrupted.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        examples/restart.py --kill 20 --check

After step 20, in the middle of an epoch, the last process kills itself, as the system
does where memory runs out. torchrun ends the other one and starts both again, and they
go on from the last checkpoint. With --check they then train once more without a break,
and fail unless all weights are the same, to the bit.

Without the first line, torchrun gives the processes that it restarts the addresses of
those that are gone, and they may not find each other:
https://github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import digits_problem as problem
import torchstrategy


class Training:
    """All that changes in the course of the training.

    A checkpoint has to hold all of this, and nothing else.
    """

    def __init__(self, strategy: torchstrategy.Strategy) -> None:
        torch.manual_seed(0)
        self.strategy = strategy
        training_rows, _ = problem.digits()
        self.dataset = strategy.experimental_distribute_dataset(
            DataLoader(training_rows, batch_size=100, shuffle=True)
        )
        with strategy.scope():
            self.model = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 128),
                nn.Tanh(),
                nn.Dropout(),
                nn.Linear(128, 10),
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.7)
        self.steps = 0
        self.epoch = 0

    def step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    def save(self, path: Path) -> None:
        """Writes a checkpoint, in one of the processes: all have the same state."""
        if not self.strategy.extended.should_checkpoint:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            # How many batches of this epoch are done, and their order.
            "dataset": self.dataset.state_dict(),
            # Dropout draws from this generator. On GPUs, also save
            # torch.cuda.get_rng_state_all().
            "random": torch.get_rng_state(),
            "steps": self.steps,
            "epoch": self.epoch,
        }
        new = path.with_suffix(".new")
        torch.save(state, new)
        # A process that is killed while it writes leaves the last checkpoint whole.
        os.replace(new, path)

    def load(self, path: Path) -> None:
        """Reads the checkpoint, in every process."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.dataset.load_state_dict(state["dataset"])
        torch.set_rng_state(state["random"])
        self.steps, self.epoch = state["steps"], state["epoch"]


def train(
    strategy: torchstrategy.Strategy,
    options: argparse.Namespace,
    checkpoint: Path | None,
) -> nn.Module:
    """The trained model.

    Without a checkpoint it begins at the first step, and saves nothing.
    """
    training = Training(strategy)
    if checkpoint is not None and checkpoint.exists():
        training.load(checkpoint)
        say(f"the training goes on after step {training.steps}")
    while training.epoch < options.epochs:
        for batch in training.dataset:  # after a restart, what is left of the epoch
            strategy.run(training.step, args=(batch,))
            training.scheduler.step()
            training.steps += 1
            if checkpoint is not None:
                if training.steps % options.every == 0:
                    training.save(checkpoint)
                if training.steps == options.kill and is_to_be_killed():
                    kill_this_process()
        training.epoch += 1
    return training.model


def is_to_be_killed() -> bool:
    """Whether this is the last process, and torchrun has not restarted it yet."""
    rank, size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    return rank == size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    if problem.is_first_process():
        print(text, flush=True)


def check(model: nn.Module, unbroken: nn.Module) -> None:
    """Exits with an error unless the weights of the two are the same."""
    expected = unbroken.state_dict()
    unlike = [
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, expected[name])
    ]
    if unlike:
        sys.exit(f"{', '.join(unlike)}: not the weights of an unbroken run")
    say("all weights are those of an unbroken run, to the bit")


def main(options: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    model = train(strategy, options, options.checkpoint)
    say(f"test accuracy {100 * problem.accuracy(model.eval()):.1f} %")
    if options.check:
        check(model, train(strategy, options, None))
    if strategy.extended.should_checkpoint:
        # The training is over, and the next one is not to go on from here.
        options.checkpoint.unlink(missing_ok=True)


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
        "--checkpoint",
        type=Path,
        default="restart.pt",
        help="a file all processes see; default: restart.pt",
    )
    parser.add_argument(
        "--kill",
        type=problem.positive,
        help="the step after which one process kills itself; default: none",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train without a break, and fail if the two differ",
    )
    return parser


if __name__ == "__main__":
    main(argument_parser().parse_args())
