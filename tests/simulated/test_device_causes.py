"""`assert_same_as_plain` across a real device boundary.

Correct steps pass, and what was left elsewhere is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchstrategy
from problems import data, mlp, sgd
from torchstrategy.testing import assert_same_as_plain

# Even, uneven, and fewer rows than replicas.
BATCHES = [data(8, seed=1), data(7, seed=2), data(3, seed=3)]

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""What makes the loss of each row, of the model, the inputs and the targets."""


def spread(parameter_device: str = "cpu") -> torchstrategy.Strategy:
    """A replica on each of four devices, and the parameters here."""
    return torchstrategy.CentralStorageStrategy(
        [f"sim:{i}" for i in range(4)], parameter_device
    )


PARAMETERS = pytest.mark.parametrize(
    "parameter_device", ["cpu", "sim:0", "sim:4"], ids=["cpu", "shared", "offset"]
)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def trained_by(forward: Forward) -> Callable[[Any, Any, Any], Tensor]:
    """The step that makes an update by these losses."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        optimizer.zero_grad()
        losses = forward(model, *batch)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return step


def plain_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return squares(model(inputs), targets).mean(1)


def failure(
    forward: Forward,
    model_fn: Callable[[], nn.Module] = mlp,
    parameter_device: str = "cpu",
) -> str:
    """What is said of a step that is not the same."""
    with pytest.raises(AssertionError) as caught:
        assert_same_as_plain(
            trained_by(forward), model_fn, sgd, BATCHES, spread(parameter_device)
        )
    return " ".join(str(caught.value).split())


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


# Correct steps


@PARAMETERS
def test_a_correct_step_is_the_same(parameter_device: str) -> None:
    assert_same_as_plain(
        trained_by(plain_losses), mlp, sgd, BATCHES, spread(parameter_device)
    )


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            lambda: torchstrategy.CentralStorageStrategy(["sim:1"]),
            id="central_in_place",
        ),
        pytest.param(
            lambda: torchstrategy.CentralStorageStrategy(["sim:1"], "cpu"),
            id="central_from_the_cpu",
        ),
        pytest.param(lambda: torchstrategy.OneDeviceStrategy("sim:2"), id="one_device"),
    ],
)
def test_one_replica_draws_what_plain_pytorch_draws(
    strategy: Callable[[], torchstrategy.Strategy],
) -> None:
    assert_same_as_plain(
        trained_by(plain_losses), with_dropout, sgd, BATCHES, strategy()
    )


def test_weights_that_are_brought_to_their_rows_are_the_same() -> None:
    weights = torch.tensor([1.0, 2.0], device="sim:0")

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return (squares(model(inputs), targets) * weights.to(inputs.device)).mean(1)

    assert_same_as_plain(trained_by(forward), mlp, sgd, BATCHES, spread())


# What is somewhere else


@PARAMETERS
def test_a_tensor_that_was_left_on_device_0_is_named(parameter_device: str) -> None:
    class_weights = torch.tensor([1.0, 2.0], device="sim:0")

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return (squares(model(inputs), targets) * class_weights).mean(1)

    said = failure(forward, parameter_device=parameter_device)
    assert said.startswith(
        "At step 1 of 3, replica 1 of 4 on sim:1 met another device; plain PyTorch on "
        "sim:0 did not"
    )
    assert (
        "Expected all tensors to be on the same device, but found at least two "
        "devices, sim:1 and sim:0!" in said
    )
    assert (
        "Cause: `class_weights`, a closure variable of `forward`, is a tensor on sim:0."
        in said
    )
    assert (
        "Bring a tensor to its rows, in the step: `weight.to(inputs.device)`. Or make "
        "it a buffer" in said
    )


def test_a_tensor_that_was_left_on_the_cpu_is_named() -> None:
    class_weights = torch.tensor([1.0, 2.0])

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return (squares(model(inputs), targets) * class_weights).mean(1)

    said = failure(forward)
    assert (
        "replica 0 of 4 on sim:0 met another device; plain PyTorch on sim:0 did as well"
        in said
    )
    assert (
        "Cause: `class_weights`, a closure variable of `forward`, is a tensor on cpu."
        in said
    )


def test_the_weight_of_a_loss_is_named() -> None:
    criterion = nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0], dtype=torch.float64, device="sim:0")
    )

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return criterion(model(inputs), targets.argmax(1))

    said = failure(forward)
    assert (
        "replica 1 of 4 on sim:1 met another device; plain PyTorch on sim:0 did not"
        in said
    )
    assert (
        "Cause: `criterion.weight`, a closure variable of `forward`, is a tensor on "
        "sim:0." in said
    )


def test_a_device_that_is_written_in_the_code_is_named() -> None:
    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return squares(model(inputs), targets.to("sim:0")).mean(1)

    said = failure(forward)
    assert (
        "replica 1 of 4 on sim:1 met another device; plain PyTorch on sim:0 did not"
        in said
    )
    assert (
        "Cause: `forward` names the device 'sim:0'. Name no device in the step: ask a "
        "tensor of the batch" in said
    )


def test_a_device_that_a_function_has_named_which_has_returned_is_named() -> None:
    def at_home(tensor: Tensor) -> Tensor:
        return tensor.to("sim:0")

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return squares(model(inputs), at_home(targets)).mean(1)

    assert (
        "Cause: `step` names the device 'sim:0'. Name no device in the step"
        in failure(forward)
    )


def test_a_device_that_is_written_in_a_module_is_named() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs) * torch.ones(2, device="sim:0")

    said = failure(plain_losses, Masked)
    assert (
        "replica 1 of 4 on sim:1 met another device; plain PyTorch on sim:0 did not"
        in said
    )
    assert (
        "Cause: `forward` names the device 'sim:0'. Name no device in the step" in said
    )


def test_a_generator_of_another_kind_of_device_is_named() -> None:
    generator = torch.Generator()

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        noise = torch.rand(inputs.shape, generator=generator, device=inputs.device)
        return squares(model(inputs + noise), targets).mean(1)

    said = failure(forward)
    assert (
        "replica 0 of 4 on sim:0 met another device; plain PyTorch on sim:0 did as well"
        in said
    )
    assert (
        "Cause: `generator`, a closure variable of `forward`, is a generator of cpu."
        in said
    )
    assert (
        "Draw from torch's default generator, which gives each replica a stream of its "
        "own." in said
    )


# A GPU takes the generator of another GPU.
@pytest.mark.parametrize("home", ["cpu", "sim:0"])
def test_a_generator_that_draws_for_all_replicas_is_named(home: str) -> None:
    generator = torch.Generator(home)

    def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        device = "cpu" if home == "cpu" else inputs.device
        noise = torch.rand(inputs.shape, generator=generator, device=device).to(
            inputs.device
        )
        return squares(model(inputs + noise), targets).mean(1)

    assert (
        "`generator`, a closure variable of `forward`, is a generator that all "
        "replicas share" in failure(forward)
    )


# What is wrong on any device


@PARAMETERS
def test_dropout_is_found(parameter_device: str) -> None:
    said = failure(plain_losses, with_dropout, parameter_device)
    assert "Cause: Random numbers (Dropout `1` in training mode)" in said
    assert "Without it the two agree." in said


@PARAMETERS
def test_a_loss_that_sums_is_found(parameter_device: str) -> None:
    said = failure(
        lambda model, *batch: plain_losses(model, *batch).sum(),
        parameter_device=parameter_device,
    )
    assert (
        "Cause: The loss is a sum over rows, and the replicas' gradients are averaged"
        in said
    )
    assert "every gradient is 1/4 of plain PyTorch's" in said
