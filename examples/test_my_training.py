"""A training step, tested for several GPUs on a machine without a GPU.

The tests also show four bugs that appear on several GPUs only.

    pytest examples/test_my_training.py --simulate-devices=4

To test your own step, copy the code above the bugs, and put your model, optimizer,
batches and step in. Below, the same step has one bug at a time, and each test shows the
words of the message that name the bug. Without the option, the tests run on replicas of
the CPU, and pytest skips the test that needs several devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import torchstrategy
from torchstrategy.testing import assert_same_as_plain

Batch = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def make_optimizer(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def make_batches() -> Iterator[Batch]:
    # Four replicas get 2, 2, 2, 2 rows; 2, 2, 2, 1; and 1, 1, 1, 0.
    for rows in (8, 7, 3):
        yield torch.randn(rows, 6), torch.randint(3, (rows,))


def update(optimizer: Optimizer, losses: Tensor) -> Tensor:
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    return losses.detach()


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    inputs, labels = batch
    return update(optimizer, F.cross_entropy(model(inputs), labels, reduction="none"))


def test_replicas_train_as_one_device_does(strategy: torchstrategy.Strategy) -> None:
    assert_same_as_plain(
        train_step, make_model, make_optimizer, make_batches(), strategy
    )


# Four bugs. On one device, each of these steps is correct.


@pytest.mark.strategies("central", replicas=[4], places=["sim"])
def test_a_tensor_left_on_device_0(
    strategy: torchstrategy.Strategy, simulated_devices: list[torch.device]
) -> None:
    # The bug: the other devices have none.
    class_weights = torch.tensor([1.0, 2.0, 0.5], device=simulated_devices[0])

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        inputs, labels = batch
        return update(
            optimizer,
            F.cross_entropy(model(inputs), labels, class_weights, reduction="none"),
        )

    with pytest.raises(
        AssertionError,
        match=r"`class_weights`, a closure variable of `step`, is a tensor on sim:0",
    ):
        assert_same_as_plain(step, make_model, make_optimizer, make_batches(), strategy)


@pytest.mark.strategies("central", replicas=[2, 4])
def test_a_loss_that_depends_on_the_replica_count(
    strategy: torchstrategy.Strategy,
) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        inputs, labels = batch
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        replicas = torchstrategy.get_strategy().num_replicas_in_sync
        # The bug: gradients are averaged already.
        return update(optimizer, losses / replicas)

    with pytest.raises(
        AssertionError, match=r"The loss depends on the number of replicas"
    ):
        assert_same_as_plain(step, make_model, make_optimizer, make_batches(), strategy)


@pytest.mark.strategies("central", replicas=[2, 4])
def test_state_written_in_forward(strategy: torchstrategy.Strategy) -> None:
    class CountsRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()
            self.rows_seen = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.rows_seen += len(inputs)  # the bug: each replica counts its own rows
            return self.layers(inputs)

    with pytest.raises(
        AssertionError, match=r"State is written in the step: the attribute `rows_seen`"
    ):
        assert_same_as_plain(
            train_step, CountsRows, make_optimizer, make_batches(), strategy
        )


@pytest.mark.strategies("central", replicas=[2, 4])
def test_a_shared_generator(strategy: torchstrategy.Strategy) -> None:
    generator = torch.Generator().manual_seed(0)

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        inputs, labels = batch
        # The bug: all replicas share it.
        noise = torch.randn(inputs.shape, generator=generator, device="cpu")
        return update(
            optimizer,
            F.cross_entropy(
                model(inputs + noise.to(inputs.device)), labels, reduction="none"
            ),
        )

    with pytest.raises(
        AssertionError, match=r"`generator`, .*, is a generator that all replicas share"
    ):
        assert_same_as_plain(step, make_model, make_optimizer, make_batches(), strategy)
