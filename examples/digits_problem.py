"""What the two digits programs share.

They share the data, the network, the command line, and how two runs are compared.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

if TYPE_CHECKING:
    import torchstrategy

Batch = TypeVar("Batch")
Train = Callable[[argparse.Namespace], tuple[nn.Module, list[Tensor]]]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LEARNING_RATES = {"sgd": 0.2, "adam": 0.005}

# N replicas add the same numbers in another order, so the two runs may differ by
# rounding and by no more. Adam divides a gradient by its own size, so the rounding
# error of a gradient near zero matters as much as that of a large one.
# The allowed difference of losses is multiplied by a loss above 1.
ALLOWED_LOSS = {"float32": 1e-5, "float64": 1e-9}
ALLOWED_WEIGHT = {
    "float32": {"sgd": 1e-5, "adam": 1e-4},
    "float64": {"sgd": 1e-9, "adam": 1e-9},
}


class Net(nn.Module):
    """Two convolutions and two linear layers.

    There is no dropout, which would draw another mask in each replica, and no batch
    normalisation, which would see smaller batches: the step on N replicas is the step
    on one device. The functions are smooth, because the slope of a ReLU or of max
    pooling jumps, and then rounding in the last digit decides between two different
    gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.linear1 = nn.Linear(32 * 4 * 4, 64)
        self.linear2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        # [rows, 32, 8, 8].
        features = torch.tanh(self.conv2(torch.tanh(self.conv1(images))))
        features = F.avg_pool2d(features, 2).flatten(1)  # [rows, 512]
        return self.linear2(torch.tanh(self.linear1(features)))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on, and 360 to test on, which are every fifth one.

    Neighbours in the file are by one writer, so both sets have images of all writers.
    """
    bunch = load_digits()
    images = (
        torch.as_tensor(bunch.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    )  # [1797, 1, 8, 8]
    labels = torch.as_tensor(bunch.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(
        images[test], labels[test]
    )


def batches(options: argparse.Namespace) -> DataLoader[tuple[Tensor, ...]]:
    """The training images, shuffled by torch's global generator.

    The last batch is smaller than the others.
    """
    training, _ = digits()
    return DataLoader(training, batch_size=options.batch_size, shuffle=True)


def progress(loader: Iterable[Batch], epoch: int) -> Iterable[Batch]:
    """A progress bar on standard error, if that is a terminal."""
    disable = None if is_first_process() else True  # None: if it is no terminal
    return tqdm(
        loader, desc=f"epoch {epoch + 1}", unit="batch", disable=disable, leave=False
    )


def is_first_process() -> bool:
    """Whether this process prints: of the workers of torchrun, one does."""
    return (
        not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_rank() == 0
    )


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the test images that the model classifies correctly.

    Outside `run` a model is plain PyTorch.
    """
    _, test = digits()
    images, labels = (
        tensor.to(next(model.parameters()).device) for tensor in test.tensors
    )
    return (model(images).argmax(1) == labels).double().mean().item()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def argument_parser() -> argparse.ArgumentParser:
    rates = ", ".join(
        f"{rate} for {optimizer}" for optimizer, rate in LEARNING_RATES.items()
    )
    parser = argparse.ArgumentParser()
    parser.set_defaults(check=False, plot=None)
    parser.add_argument("--epochs", type=positive, default=5, help="default: 5")
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=100,
        help="rows of a step, over all replicas; default: 100",
    )
    parser.add_argument(
        "--optimizer",
        choices=["sgd", "adam"],
        default="sgd",
        help="default: sgd, with momentum 0.9",
    )
    parser.add_argument("--lr", type=float, help=f"learning rate; default: {rates}")
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float32",
        help="default: float32",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first weights and of the shuffling; default: 0",
    )
    return parser


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    strategies = ["default", "one", "central", "mirrored", "workers"]
    parser.add_argument(
        "--strategy", choices=strategies, default="central", help="default: central"
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        help=(
            "of central or mirrored, or of each of the workers that torchrun starts; "
            "default: as many as devices, and for one device 2 of central or mirrored "
            "and 1 of each worker"
        ),
    )
    parser.add_argument(
        "--device", help="of one, or of the replicas, with commas between; default: cpu"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train digits_plain.py, and fail if the two differ",
    )
    parser.add_argument(
        "--plot",
        help="also train digits_plain.py, and draw both in this file; needs matplotlib",
    )


def new_strategy(options: argparse.Namespace) -> torchstrategy.Strategy:
    """The strategy that the command line asks for."""
    # Not at the top of the file, because digits_plain imports this file and does not
    # need torchstrategy.
    import torchstrategy

    if options.strategy == "central":
        return torchstrategy.CentralStorageStrategy(
            compute_devices=compute_devices(options, 2)
        )
    if options.strategy == "mirrored":
        return torchstrategy.MirroredStrategy(compute_devices(options, 2))
    if options.strategy == "workers":
        return torchstrategy.MultiWorkerMirroredStrategy(
            devices=compute_devices(options, 1)
        )
    if options.replicas not in (None, 1):
        sys.exit(
            f"--strategy {options.strategy} has one replica, and --replicas asks for "
            f"{options.replicas}"
        )
    if options.strategy == "one":
        return torchstrategy.OneDeviceStrategy(options.device or "cpu")
    if options.device is not None:
        sys.exit(
            "--strategy default runs where the tensors are and takes no --device: "
            "--strategy one does"
        )
    return torchstrategy.get_strategy()


def compute_devices(options: argparse.Namespace, default: int) -> list[str]:
    """One device for each replica.

    `default` is how many replicas one device has if the command line does not say.
    """
    devices = (options.device or "cpu").split(",")
    if len(devices) == 1:
        return devices * (options.replicas or default)
    if options.replicas not in (None, len(devices)):
        sys.exit(
            f"--replicas asks for {options.replicas}, and --device lists "
            f"{len(devices)}: leave one of the two out"
        )
    return devices


def main(train: Train, options: argparse.Namespace) -> None:
    torch.set_default_dtype(DTYPES[options.dtype])
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    if options.check:
        # A GPU would round to ten bits, and the plain twin is on the CPU.
        torch.backends.cudnn.allow_tf32 = False
    start = time.perf_counter()
    model, losses = train(options)
    seconds = time.perf_counter() - start
    if is_first_process():
        print(f"{len(losses)} steps in {seconds:.1f} s, last loss {losses[-1]:.4f}")
        print(f"test accuracy {100 * accuracy(model):.1f} %")
    if options.check or options.plot:
        # Not at the top of the file, because digits_plain imports this file.
        import digits_plain

        plain_model, plain_losses = digits_plain.train(options)
        if options.check:
            compare(options, model, losses, plain_model, plain_losses)
        if options.plot and is_first_process():
            plot(
                options.plot,
                losses,
                plain_losses,
                accuracy(model),
                accuracy(plain_model),
            )


def check(options: argparse.Namespace, model: nn.Module, losses: list[Tensor]) -> None:
    """Trains the plain twin, and fails unless losses and weights are the same.

    On a failure, the program exits with an error. Each worker checks its own result.
    """
    import digits_plain

    compare(options, model, losses, *digits_plain.train(options))


def compare(
    options: argparse.Namespace,
    model: nn.Module,
    losses: list[Tensor],
    plain_model: nn.Module,
    plain_losses: list[Tensor],
) -> None:
    loss = distance(losses, plain_losses, relative_above=1.0)
    weight = distance(model.state_dict().values(), plain_model.state_dict().values())
    allowed_loss, allowed_weight = (
        ALLOWED_LOSS[options.dtype],
        ALLOWED_WEIGHT[options.dtype][options.optimizer],
    )
    if is_first_process():
        print(
            f"largest difference from plain PyTorch: losses {loss:.1e} (allowed "
            f"{allowed_loss:.0e}), weights {weight:.1e} (allowed {allowed_weight:.0e})"
        )
    # The condition is written like this so that a NaN fails.
    if not (loss <= allowed_loss and weight <= allowed_weight):
        sys.exit("the run under the strategy is not the plain one")


def plot(
    path: str,
    losses: list[Tensor],
    plain_losses: list[Tensor],
    right: float,
    plain_right: float,
) -> None:
    """Draws the losses of the two runs, one over the other, above their difference."""
    from matplotlib.figure import Figure

    found, expected = ([loss.item() for loss in run] for run in (losses, plain_losses))
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    above.plot(
        expected,
        linewidth=5,
        alpha=0.4,
        label=f"plain PyTorch, test accuracy {plain_right:.1%}",
    )
    above.plot(found, linewidth=1.5, label=f"replicas, test accuracy {right:.1%}")
    above.set_ylabel("loss")
    above.legend()
    below.plot([one - other for one, other in zip(found, expected, strict=True)])
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.savefig(path)


def distance(
    tensors: Iterable[Tensor],
    expected: Iterable[Tensor],
    relative_above: float = math.inf,
) -> float:
    """The largest difference of two lists of tensors.

    It is relative to expected values above `relative_above`.
    """
    differences = [
        (tensor.cpu() - wanted).abs() / (wanted.abs() / relative_above).clamp(min=1.0)
        for tensor, wanted in zip(tensors, expected, strict=True)
    ]
    return torch.cat([difference.flatten() for difference in differences]).max().item()
