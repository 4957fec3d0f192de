"""A step of replicas waits for an accelerator no more often than a plain step.

The same step in plain PyTorch never does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy.testing import simulated_devices, virtual_time

DEVICES = simulated_devices()
WIDTH = 16

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "one device": lambda: torchstrategy.OneDeviceStrategy(DEVICES[0]),
    "central, one device twice": lambda: torchstrategy.CentralStorageStrategy(
        [DEVICES[0]] * 2, DEVICES[0]
    ),
    "central, two devices": lambda: torchstrategy.CentralStorageStrategy(
        DEVICES[:2], DEVICES[0]
    ),
    "mirrored": lambda: torchstrategy.MirroredStrategy(DEVICES[:2]),
}


def make_net(device: Any, is_training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(3)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    ]
    return nn.Sequential(*layers).to(device).train(is_training)


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def nothing(net: nn.Module) -> None:
    """Leaves gradients as they are."""


def stepping(
    strategy: torchstrategy.Strategy,
    net: nn.Module,
    change: Callable[[nn.Module], None],
) -> Any:
    strategy.distribute_module(net)
    optimizer = strategy.distribute_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        change(net)
        optimizer.step()

    (rows,) = strategy.experimental_distribute_dataset(
        [torch.randn(9, WIDTH, device=DEVICES[0])]
    )
    return lambda: strategy.run(step, args=(rows,))


@pytest.mark.parametrize("change", [nothing, clip])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_warm_step_with_batch_norm_and_clipping_waits_for_no_device(
    kind: str, is_training: bool, change: Callable[[nn.Module], None]
) -> None:
    """It compared running statistics and clipped gradients one by one.

    That was 120 and 40 waits for 20 layers.
    """
    with virtual_time("H100") as trace:
        run = stepping(STRATEGIES[kind](), make_net(DEVICES[0], is_training), change)
        for _ in range(3):
            run()
        trace.mark()
        run()
    assert not trace.step(-1).synchronizations


FAMILIES = [
    "perceptron",
    "convolutions and batch norm",
    "convolutions and SyncBatchNorm",
    "LSTM",
    "transformer",
    "embedding",
]


@pytest.mark.parametrize(
    "change", ["", "clipped", "scaled"], ids=["as it is", "clipped", "scaled"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_step_of_a_family_of_models_waits_no_more_than_in_plain_torch(
    family: str, change: str, counting: Any
) -> None:
    """Under every strategy, and in workers with one replica each.

    What a GradScaler waits for, it waits for once.
    """
    assert list(counting.FAMILIES) == FAMILIES
    found = {
        way: counting.by_whom(reasons)
        for way, reasons in counting.waits(family, change).items()
    }
    plain = len(found[counting.PLAIN][0])
    assert plain == (change == "scaled")
    assert {
        way: of_devices
        for way, (of_devices, _) in found.items()
        if len(of_devices) > plain
    } == {}
    # Workers compare what they have, once for each backward and four times for each
    # layer of SyncBatchNorm.
    meetings = 13 if family == "convolutions and SyncBatchNorm" else 1
    of_workers = {way: len(reasons) for way, (_, reasons) in found.items() if reasons}
    assert of_workers == {counting.WORKERS: meetings}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_statistics_that_no_replica_changes_keep_their_bits(kind: str) -> None:
    """A mean of three equal numbers would be another number now and then.

    Each is multiplied by its part of the rows.
    """
    net = make_net(DEVICES[0], is_training=False)
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.1, 1.0)
    before = [buffer.cpu().clone() for buffer in net.buffers()]
    run = stepping(STRATEGIES[kind](), net, nothing)
    for _ in range(3):
        run()
    for one, other in zip(before, net.buffers(), strict=True):
        assert torch.equal(one, other.cpu())


def test_statistics_that_a_forward_outside_of_runs_writes_come_to_the_replicas() -> (
    None
):
    """Nobody compares them, since the host would wait.

    They are brought to all replicas before each run.
    """
    strategy = torchstrategy.MirroredStrategy(DEVICES[:2])
    net = make_net(DEVICES[0])
    strategy.distribute_module(net)
    x = torch.randn(8, WIDTH, device=DEVICES[0])
    strategy.run(lambda: None)
    net(x)
    net.eval()
    outputs = strategy.experimental_local_results(
        strategy.run(lambda: net(x.to(next(net.parameters()).device)))
    )
    for output in outputs:
        torch.testing.assert_close(output.detach().cpu(), net(x).detach().cpu())


@pytest.mark.parametrize("kind", ["central, two devices", "mirrored"])
def test_gradients_of_own_rows_that_are_written_are_weighed(kind: str) -> None:
    """Where replicas do not do the same to a gradient, each counts as it has rows.

    The device finds out.
    """
    net = nn.Linear(WIDTH, 1, bias=False).to(DEVICES[0])

    def write(net: nn.Module) -> None:
        replica = torchstrategy.get_replica_context().replica_id_in_sync_group
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(1.0 + replica)

    before = net.weight.detach().cpu().clone()
    stepping(STRATEGIES[kind](), net, write)()
    mean = (5 * 1.0 + 4 * 2.0) / 9  # five rows, and four
    torch.testing.assert_close(net.weight.detach().cpu(), before - 0.1 * mean)
