"""Evaluates a model. Several replicas find exactly the result of one device.

The 360 test images do not divide into batches of 119, nor the 3 of the last batch among
4 replicas. No row is padded, repeated or dropped: a replica that gets no rows skips the
step, and `strategy.reduce` adds up the rows of the others. To see it:

    python examples/evaluate.py --replicas 4 --check
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import digits_plain
import digits_problem as problem
import torchstrategy

# The number of rows, how many of them are classified correctly, and their mean loss.
Found = tuple[int, int, float]

# Replicas add the same losses in another order, and so may differ by rounding; counts
# may not.
ALLOWED_LOSS = 1e-5


def evaluate(
    strategy: torchstrategy.Strategy, model: nn.Module, loader: DataLoader
) -> Found:
    """Evaluates a model of the strategy on all rows of the loader."""

    @torch.no_grad()
    def test_step(batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        # A number for each row, because the average of the means of unequal batches is
        # not the mean over all rows.
        return {
            "rows": torch.ones_like(labels),
            "right": logits.argmax(1) == labels,
            "loss": F.cross_entropy(logits, labels, reduction="none"),
        }

    model.eval()
    totals = Counter()
    for batch in strategy.experimental_distribute_dataset(loader):
        per_replica = strategy.run(test_step, args=(batch,))
        totals.update(strategy.reduce("sum", per_replica, axis=0))
    return (
        int(totals["rows"]),
        int(totals["right"]),
        float(totals["loss"] / totals["rows"]),
    )


@torch.no_grad()
def evaluate_plainly(model: nn.Module, loader: DataLoader) -> Found:
    """The same without a strategy."""
    model.eval()
    rows, right, loss = 0, 0, 0.0
    for images, labels in loader:
        logits = model(images)
        rows += len(labels)
        right += (logits.argmax(1) == labels).sum().item()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
    return rows, right, loss / rows


def train() -> nn.Module:
    """The network of digits_plain.py, after an epoch."""
    options = argparse.Namespace(
        epochs=1, batch_size=100, optimizer="sgd", lr=0.2, seed=0
    )
    return digits_plain.train(options)[0]


def evaluate_under(replicas: int, model: nn.Module, loader: DataLoader) -> Found:
    """Evaluates a copy of the model, like a model that is read from a checkpoint."""
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * replicas)
    with strategy.scope():
        copied = problem.Net()
    copied.load_state_dict(model.state_dict())
    return evaluate(strategy, copied, loader)


def described(found: Found) -> str:
    rows, right, loss = found
    return (
        f"{right} of {rows} images right, {100 * right / rows:.1f} %, mean loss "
        f"{loss:.4f}"
    )


def check(model: nn.Module, loader: DataLoader) -> None:
    """Evaluates plainly and under 1 to 5 replicas.

    The program exits with an error unless all results are the same.
    """
    expected = evaluate_plainly(model, loader)
    print(f"plain PyTorch: {described(expected)}")
    for replicas in range(1, 6):
        found = evaluate_under(replicas, model, loader)
        same = found[:2] == expected[:2] and abs(found[2] - expected[2]) <= ALLOWED_LOSS
        if not same:
            sys.exit(
                f"{replicas} replicas: {described(found)}, which is not what plain "
                "PyTorch finds"
            )
    print("1 to 5 replicas: the same")


def main(options: argparse.Namespace) -> None:
    _, test = problem.digits()
    loader = DataLoader(test, batch_size=options.batch_size)
    model = train()
    print(
        f"{options.replicas} replicas: "
        f"{described(evaluate_under(options.replicas, model, loader))}"
    )
    if options.check:
        check(model, loader)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--replicas", type=problem.positive, default=4, help="default: 4"
    )
    parser.add_argument(
        "--batch-size",
        type=problem.positive,
        default=119,
        help="over all replicas; default: 119",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also evaluate plainly and under 1 to 5 replicas, and compare",
    )
    return parser


if __name__ == "__main__":
    main(argument_parser().parse_args())
