"""A generator learns to draw handwritten digits, against a discriminator.

The digits are the 8x8 ones of scikit-learn. One step trains both networks.

The step has what adversarial training has: two networks, two optimizers, two updates
one after the other, a `detach` between them, and batch normalisation, by which each
image of a batch depends on all others. After each step an average of the generator's
weights is updated. This checks that N replicas learn what plain PyTorch learns:

    python examples/gan.py --replicas 3 --check
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm

import digits_problem as problem
import torchstrategy

NOISE, WIDTH = 32, 128

# The largest difference allowed in weights and statistics, in float64. In float32,
# rounding may decide on which side of the bend of a LeakyReLU a value is, and then the
# two networks, which train against each other, learn differently.
ALLOWED = 1e-9

SHADES = " .:-=+*#%@"


def digits() -> Tensor:
    """The 1,797 images as rows of 64 pixels between -1 and 1."""
    return torch.as_tensor(load_digits().data, dtype=torch.get_default_dtype()) / 8 - 1


def with_noise(images: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch: real images, and noise from which the generator makes as many images.

    The noise is drawn here, for the whole batch, and the strategy splits it with the
    images. Noise drawn in the step would train as well. But there each replica draws
    its own random numbers, which differ from those of one device.
    """
    return torch.stack(images), torch.randn(len(images), NOISE)


class Gan:
    """Two networks, their optimizers, and a step in plain PyTorch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.generator = nn.Sequential(
            nn.Linear(NOISE, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.LeakyReLU(0.2),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.LeakyReLU(0.2),
            nn.Linear(WIDTH, 64),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.LeakyReLU(0.2),
            nn.Linear(WIDTH, WIDTH),
            nn.LeakyReLU(0.2),
            nn.Linear(WIDTH, 1),
        )
        self.generator_optimizer = adam(self.generator, options.lr)
        self.discriminator_optimizer = adam(self.discriminator, options.lr)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        # Local variables, and not attributes: all replicas share `self`.
        real, noise = batch
        fake = self.generator(noise)

        self.discriminator_optimizer.zero_grad()
        # -log p(real) - log(1 - p(fake)), where p is the sigmoid of what the
        # discriminator returns
        judged = F.softplus(-self.discriminator(real)) + F.softplus(
            self.discriminator(fake.detach())
        )
        judged.mean().backward()
        self.discriminator_optimizer.step()

        self.generator_optimizer.zero_grad()
        # The updated discriminator judges the fakes.
        unmasked = F.softplus(-self.discriminator(fake))
        unmasked.mean().backward()
        self.generator_optimizer.step()


def adam(network: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=lr, betas=(0.5, 0.999))


def average_of(network: nn.Module) -> AveragedModel:
    """A network of the same kind, which holds moving averages of `network`.

    Its weights and statistics are averages of those of `network`.
    """
    return AveragedModel(
        network, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True
    )


def batches(options: argparse.Namespace) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(digits(), options.batch_size, shuffle=True, collate_fn=with_noise)


def repeated(loader: Iterable[Any], steps: int) -> Iterator[Any]:
    """As many batches as steps, epoch after epoch."""
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    return iter(
        tqdm(
            itertools.islice(epochs, steps),
            total=steps,
            unit="step",
            disable=None,
            leave=False,
        )
    )


def train(options: argparse.Namespace, steps: int) -> tuple[Gan, AveragedModel]:
    """The trained networks, and the average of the generator."""
    torch.manual_seed(options.seed)
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * options.replicas)
    loader = strategy.experimental_distribute_dataset(batches(options))
    with strategy.scope():
        gan = Gan(options)
        # Each replica sees a part of the batch, but needs the mean and variance of the
        # whole batch.
        gan.generator = torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(
            gan.generator
        )
    average = average_of(gan.generator)
    for batch in repeated(loader, steps):
        strategy.run(gan.step, args=(batch,))
        # This is not in the step, which runs in every replica.
        average.update_parameters(gan.generator)
    return gan, average


def train_plainly(options: argparse.Namespace, steps: int) -> tuple[Gan, AveragedModel]:
    """The same without a strategy."""
    torch.manual_seed(options.seed)
    loader = batches(options)
    gan = Gan(options)
    average = average_of(gan.generator)
    for batch in repeated(loader, steps):
        gan.step(batch)
        average.update_parameters(gan.generator)
    return gan, average


@torch.no_grad()
def distance_to_digits(generator: nn.Module) -> float:
    """How far made images are from real ones: the Fréchet distance.

    It compares the mean and the covariance of their pixels.
    """
    real, made = digits(), generator.eval()(torch.randn(2000, NOISE))
    mean = (real.mean(0) - made.mean(0)).square().sum()
    a, b = real.T.cov(), made.T.cov()
    return (
        mean + a.trace() + b.trace() - 2 * torch.linalg.eigvals(a @ b).sqrt().real.sum()
    ).item()


@torch.no_grad()
def drawing(generator: nn.Module, count: int = 8) -> str:
    """Some made images, side by side."""
    made = generator.eval()(torch.randn(count, NOISE)).unflatten(1, (8, 8))
    shades = ((made + 1) / 2 * (len(SHADES) - 1)).round().long()
    return "\n".join(
        "   ".join("".join(SHADES[s] * 2 for s in image[row]) for image in shades)
        for row in range(8)
    )


def check(options: argparse.Namespace, steps: int = 20) -> None:
    """Trains a little in replicas and plainly.

    The program exits with an error unless the results are the same.
    """
    torch.set_default_dtype(torch.float64)
    (gan, average), (plain_gan, plain_average) = (
        train(options, steps),
        train_plainly(options, steps),
    )
    torch.set_default_dtype(torch.float32)
    networks = [gan.generator, gan.discriminator, average]
    plain_networks = [plain_gan.generator, plain_gan.discriminator, plain_average]
    pairs = zip(networks, plain_networks, strict=True)
    difference = max(
        problem.distance(a.state_dict().values(), b.state_dict().values())
        for a, b in pairs
    )
    print(
        f"largest difference from plain PyTorch after {steps} steps: {difference:.1e} "
        f"(allowed {ALLOWED:.0e})"
    )
    if not difference <= ALLOWED:  # written like this, so that a NaN fails
        sys.exit("the run under the strategy is not the plain one")


def main(options: argparse.Namespace) -> None:
    if options.check:
        check(options)
    _, untrained = train(options, 1)
    start = time.perf_counter()
    _, generator = train(options, options.steps)
    print(f"{options.steps} steps in {time.perf_counter() - start:.1f} s")
    before, after = distance_to_digits(untrained), distance_to_digits(generator)
    print(
        f"Fréchet distance of made images to real ones: {before:.1f} after one step, "
        f"{after:.1f} now"
    )
    print(drawing(generator))
    if options.check and not after < before / 4:
        sys.exit("the generator has not learned to draw")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--replicas", type=problem.positive, default=2, help="default: 2"
    )
    parser.add_argument(
        "--steps", type=problem.positive, default=1000, help="default: 1000"
    )
    parser.add_argument(
        "--batch-size",
        type=problem.positive,
        default=100,
        help="over all replicas; default: 100",
    )
    parser.add_argument(
        "--lr", type=float, default=0.001, help="learning rate; default: 0.001"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of all random numbers; default: 0"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train plainly, and fail if the two differ",
    )
    return parser


if __name__ == "__main__":
    main(argument_parser().parse_args())
