"""What sending gradients adds to a step on several GPUs, in virtual time.

`MultiWorkerMirroredStrategy` runs beside DDP.

python benchmarks/exposed.py [--json FILE]

Nothing is measured here: these are predictions. Each rank has a GPU. Shown is the time
of a step without that of the same step alone: what of the communication, and of the
work for it, does not hide under the backward.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F

import torchstrategy
from contest import PREDICTED, Contender, Row, hold, rows_of
from networks import GPT2
from torchstrategy.testing import (
    DeviceProfile,
    VirtualTrace,
    run_ranks,
    simulate_devices,
    virtual_time,
)

ALONE, DDP, VIEWS, OURS = (
    "alone",
    "DDP",
    "DDP, gradients as views of its buckets",
    "MultiWorkerMirrored",
)
STEPS = 4  # the last one counts

Make = Callable[[], nn.Module]
Step = Callable[[torch.Tensor], Any]


def stepping(net: nn.Module, model: nn.Module) -> Step:
    """The step, which is the same for all.

    `model` is the network, or what joins it to others.
    """
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


def alone(make: Make, device: torch.device) -> Step:
    """On a GPU that no other one is joined to."""
    with device:
        net = make()
    return stepping(net, net)


def in_ddp(make: Make, device: torch.device, **options: Any) -> Step:
    """The same, joined by DDP."""
    distributed.init_process_group("nccl")
    with device:
        net = make()
    return stepping(
        net,
        nn.parallel.DistributedDataParallel(net, device_ids=[device.index], **options),
    )


def in_views(make: Make, device: torch.device) -> Step:
    """The same, and DDP copies no gradients back."""
    return in_ddp(make, device, gradient_as_bucket_view=True)


def under_strategy(make: Make, device: torch.device) -> Step:
    """The same under a strategy."""
    distributed.init_process_group("nccl")
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=[device])
    with strategy.scope():
        net = make()
        step = stepping(net, net)
    return lambda tokens: strategy.run(step, args=(tokens,))


WAYS: dict[str, Callable[[Make, torch.device], Step]] = {
    ALONE: alone,
    DDP: in_ddp,
    VIEWS: in_views,
    OURS: under_strategy,
}


def seconds_of(
    way: str, ranks: int, make: Make, shape: tuple[int, int], profile: DeviceProfile
) -> float:
    """The predicted seconds of a step.

    Its batch has so many rows of so many tokens for each rank.
    """

    def main(rank: int, trace: VirtualTrace) -> None:
        device = torch.device("sim", rank)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        step = WAYS[way](make, device)
        for _ in range(STEPS):
            torch.accelerator.synchronize()
            trace.mark()
            step(tokens)
        torch.accelerator.synchronize()

    gc.collect()  # what the contender before has left on the devices
    with warnings.catch_warnings(), virtual_time(profile, shapes_only=True) as trace:
        warnings.simplefilter("ignore")  # of torch's internals, about themselves
        run_ranks(main, 1 if way == ALONE else ranks, args=(trace,))
    return trace.step(STEPS - 1).seconds


def exposed_of(
    ranks: int, make: Make, shape: tuple[int, int], profile: DeviceProfile
) -> dict[str, float]:
    """What each contender adds to the step alone, in seconds."""
    took = {way: seconds_of(way, ranks, make, shape, profile) for way in WAYS}
    return {way: seconds - took[ALONE] for way, seconds in took.items() if way != ALONE}


def exposed(rounds: int) -> Iterator[Row]:
    """GPT-2 124M in float32 on H100s that are joined by NVLink, and by 25 GB/s.

    One round says what all would.
    """
    simulate_devices(4)
    for ranks, peer in ((2, 450.0), (4, 450.0), (2, 25.0)):
        profile = replace(DeviceProfile.named("H100"), peer=peer)
        contenders = {
            DDP: Contender(float),
            VIEWS: Contender(float, (DDP,)),
            OURS: Contender(float, (DDP,), 1.0),
        }
        contest = (
            f"predicted: what sending adds to a step of GPT-2, {ranks} H100, "
            f"{peer:.0f} GB/s"
        )
        yield from rows_of(
            contest, contenders, [exposed_of(ranks, GPT2, (8, 1024), profile)], "ms"
        )


CONTESTS = (exposed,)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "", header=PREDICTED)
