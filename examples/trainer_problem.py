"""What the two trainers share.

They share the data, the log, the command line, and how two trainings are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import digits_problem

# The largest difference of losses and weights. Each replica rounds its own results to
# bfloat16.
ALLOWED = {"float64": 1e-9, "bfloat16": 0.03}


def loaders(options: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """The rows to train on, and the rows to validate on.

    The training rows come in an order that torch's generator draws.
    """
    training, test = digits_problem.digits()
    return DataLoader(training, options.batch_size, shuffle=True), DataLoader(
        test, options.batch_size
    )


def autocast(options: argparse.Namespace) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=options.precision != "float64")


class Log:
    """Prints each epoch's numbers, and writes them for TensorBoard if installed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quiet = options.quiet or not digits_problem.is_first_process()
        self.writer: Any = None
        if options.log_dir and not self.quiet:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                print("TensorBoard is not installed: the numbers are only printed")
            else:
                self.writer = SummaryWriter(options.log_dir)

    def write(self, epoch: int, **numbers: float) -> None:
        if self.quiet:
            return
        print(
            f"epoch {epoch}: "
            + ", ".join(f"{name} {number:.4f}" for name, number in numbers.items())
        )
        if self.writer is not None:
            for name, number in numbers.items():
                self.writer.add_scalar(name, number, epoch)
            self.writer.flush()


def save(state: dict[str, object], path: Path | None) -> None:
    """Writes a checkpoint in one process.

    If the process is killed meanwhile, the last checkpoint stays whole.
    """
    if path is not None and digits_problem.is_first_process():
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.set_defaults(check=False, quiet=False)
    for name, default in {"epochs": 4, "batch-size": 50, "accumulate": 2}.items():
        parser.add_argument(
            f"--{name}",
            type=digits_problem.positive,
            default=default,
            help=f"default: {default}",
        )
    parser.add_argument(
        "--precision",
        choices=list(ALLOWED),
        default="bfloat16",
        help="default: bfloat16",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a file that is written after each epoch; default: none",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint"
    )
    parser.add_argument("--log-dir", help="a folder for TensorBoard; default: none")
    return parser


def main(trainer: Any, options: argparse.Namespace) -> None:
    if options.precision == "float64":
        torch.set_default_dtype(torch.float64)
    if options.check:
        return check(trainer, options)
    training = trainer(options)
    if options.resume:
        training.load()
    training.fit(options.epochs)


def check(trainer: Any, options: argparse.Namespace) -> None:
    """Trains half of the epochs, and resumes from the checkpoint.

    The check fails unless the plain trainer learns the same.
    """
    # Not at the top of the file, because trainer_plain imports this file.
    import trainer_plain

    options.quiet = True
    plain = trainer_plain.Trainer(options)
    plain.fit(options.epochs)
    with tempfile.TemporaryDirectory() as folder:
        options.checkpoint = Path(folder) / "checkpoint.pt"
        trainer(options).fit(options.epochs // 2)
        resumed = trainer(options)
        resumed.load()
        resumed.fit(options.epochs)
    loss = digits_problem.distance(resumed.losses, plain.losses)
    weight = digits_problem.distance(
        resumed.average.state_dict().values(), plain.average.state_dict().values()
    )
    right, expected = resumed.validate(), plain.validate()
    print(
        f"largest difference from plain PyTorch: losses {loss:.1e}, weights "
        f"{weight:.1e}"
    )
    print(f"accuracy {right:.4f}, and {expected:.4f} in plain PyTorch")
    if not (max(loss, weight, abs(right - expected)) <= ALLOWED[options.precision]):
        sys.exit("the training under the strategy is not the plain one")
