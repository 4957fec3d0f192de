"""The causes that `assert_same_as_plain` names in a CNN with batch norm.

It names each bug by its own name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from conditions import for_changes
from problems import replica_id
from torchstrategy.testing import assert_same_as_plain

Step = Callable[[Any, Any, Any], Any]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def images(rows: int) -> torch.Tensor:
        return torch.randn(rows, 1, 6, 6, generator=generator) * 2 + 1

    return [
        (images(rows), torch.randint(3, (rows,), generator=generator))
        for rows in (8, 7, 8)
    ]


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn1 = norm
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.bn1(self.conv(images))).mean((2, 3)))


def of_own_rows() -> nn.Module:
    return Net(nn.BatchNorm2d(4))


def synchronized() -> nn.Module:
    return torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(of_own_rows())


def without() -> nn.Module:
    return Net(nn.Identity())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_on(change: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """A step that changes its inputs first."""

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor:
        inputs, labels = change(batch[0]), batch[1]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def check(step: Step, model_fn: Callable[[], nn.Module], **kwargs: Any) -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
    assert_same_as_plain(step, model_fn, sgd, batches(), strategy, **kwargs)


def failure(
    step: Step, model_fn: Callable[[], nn.Module] = synchronized, **kwargs: Any
) -> str:
    with pytest.raises(AssertionError) as caught:
        check(step, model_fn, **kwargs)
    return " ".join(str(caught.value).split())


models = pytest.mark.parametrize("model_fn", [synchronized, without])


@models
def test_a_right_step_passes(model_fn: Callable[[], nn.Module]) -> None:
    check(trained_on(lambda inputs: inputs), model_fn)


def test_plain_batch_normalisation_is_to_be_converted_first() -> None:
    said = failure(trained_on(lambda inputs: inputs), of_own_rows)
    assert "Cause: Batch statistics (BatchNorm2d `bn1` in training mode)" in said
    convert = said.index("torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(model)")
    assert convert < said.index("GroupNorm")


def test_synchronized_normalisation_is_not_blamed_for_a_sum() -> None:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        loss.backward()
        optimizer.step()
        return loss.detach()

    said = failure(step)
    assert "Cause: The loss is a sum over rows" in said
    assert "Batch statistics" not in said
    assert said.count("Cause:") == 1


@models
def test_a_mean_of_the_batch_in_the_step_is_named_with_its_line(
    model_fn: Callable[[], nn.Module],
) -> None:
    def centred(inputs: torch.Tensor) -> torch.Tensor:
        return inputs - inputs.mean()

    said = failure(trained_on(centred), model_fn)
    assert (
        "Cause: A statistic of the batch in the step: `return inputs - inputs.mean()` "
        "(line " in said
    )
    assert "of test_causes_of_rows.py, in `centred`)" in said
    assert "all_reduce('sum', ...)" in said
    assert said.count("Cause:") == 1


@for_changes
def test_a_mean_and_a_deviation_are_named_together() -> None:
    def standardized(inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.mean()
        deviation = inputs.std()
        return (inputs - mean) / deviation

    said = failure(trained_on(standardized), without)
    assert "A statistic of the batch in the step: `mean = inputs.mean()`" in said
    assert "and `deviation = inputs.std()`" in said


class Centred(nn.Module):
    """Subtracts the mean of the rows of a layer's output, with gradients.

    They flow through it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images).mean((2, 3))
        hidden = hidden - hidden.mean(0)
        return self.head(torch.tanh(hidden))


def test_a_mean_of_the_batch_in_the_model_is_named() -> None:
    said = failure(trained_on(lambda inputs: inputs), Centred)
    assert (
        "A statistic of the batch in the step: `hidden = hidden - hidden.mean(0)`"
        in said
    )


once: float | None = None
kept: dict[str, float] = {}
average = 0.0


def once_in_a_global(inputs: torch.Tensor) -> torch.Tensor:
    global once
    if once is None:
        once = inputs.std().item()
    return inputs / once


def once_in_a_dict(inputs: torch.Tensor) -> torch.Tensor:
    if "scale" not in kept:
        kept["scale"] = inputs.std().item()
    return inputs / kept["scale"]


def once_in_a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    scale = None

    def scaled(inputs: torch.Tensor) -> torch.Tensor:
        nonlocal scale
        if scale is None:
            scale = inputs.std().item()
        return inputs / scale

    return scaled


def once_in_an_attribute() -> Callable[[torch.Tensor], torch.Tensor]:
    held = SimpleNamespace(scale=None, scales=[])

    def scaled(inputs: torch.Tensor) -> torch.Tensor:
        if not held.scales:
            held.scales.append(inputs.std().item())
        if held.scale is None:
            held.scale = held.scales[0]
        return inputs / held.scale

    return scaled


class Scaled(nn.Module):
    """Keeps the scale of its first inputs in its class."""

    scale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if Scaled.scale is None:
            Scaled.scale = images.std().item()
        return self.head(images.flatten(1) / Scaled.scale)


@models
@pytest.mark.parametrize(
    "change",
    [once_in_a_global, once_in_a_dict, once_in_a_closure(), once_in_an_attribute()],
    ids=["global", "dict", "closure", "attribute"],
)
def test_what_is_computed_once_is_computed_once_in_each_training(
    change: Callable[[torch.Tensor], torch.Tensor], model_fn: Callable[[], nn.Module]
) -> None:
    said = failure(trained_on(change), model_fn, rtol=1e-3, atol=1e-3)
    assert (
        "Cause: With the replicas in another order, `step` gives another result" in said
    )
    assert "Rounding" not in said
    assert (once, kept) == (None, {}), "afterwards they are what they were"


def test_what_a_model_keeps_in_its_class_is_its_trainings() -> None:
    assert "Cause: With the replicas in another order" in failure(
        trained_on(lambda inputs: inputs), Scaled
    )
    assert Scaled.scale is None


def test_a_moving_average_in_a_global_is_told_of_buffer_and_all_reduce() -> None:
    def change(inputs: torch.Tensor) -> torch.Tensor:
        global average
        average = 0.9 * average + 0.1 * inputs.mean().item()
        return inputs - average

    said = failure(trained_on(change), without)
    assert "Keep such state in a buffer of the model" in said
    assert "a buffer alone is not enough" in said
    assert "all_reduce('sum', ...)" in said


def test_a_counter_that_is_right_passes() -> None:
    steps = {"taken": 0}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        if replica_id() == 0:
            steps["taken"] += 1
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + len(batch) * 0)
        return trained_on(lambda inputs: inputs)(model, optimizer, batch)

    check(step, without)
    assert steps == {"taken": 0}


@for_changes
def test_what_is_far_more_than_rounding_is_not_called_rounding() -> None:
    def change(inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1 + replica_id()) if inputs.dtype is torch.float32 else inputs

    said = failure(trained_on(change), without)
    assert "Cause: Rounding" not in said


def test_replicas_that_decide_by_their_own_loss_are_told_so() -> None:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        if loss < 1.25:
            optimizer.step()
        return loss.detach()

    with pytest.raises(AssertionError) as caught:
        check(step, without)
    said = " ".join(str(caught.value).split())
    assert said.startswith(
        "At step 1 of 3, replicas decided differently, and plain PyTorch took the "
        "step: Cause: `step`"
    )
    assert "such as the loss of a replica's own rows" in said
    assert "RuntimeError: The replicas synchronized a different number of times" in said


MIXED_DEVICES = (
    "Expected all tensors to be on the same device, but found sim:0 and sim:1"
)


def test_an_error_of_devices_is_printed_once_after_its_cause_with_its_lines() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        if torchstrategy.get_strategy().num_replicas_in_sync > 1:
            raise RuntimeError(MIXED_DEVICES)

    with pytest.raises(AssertionError) as caught:
        check(step, without)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Expected all tensors to be on the same device") == 1
    assert shown.index("Cause:") < shown.index("RuntimeError: Expected")
    assert "_group" not in shown
    assert "in step: raise RuntimeError(MIXED_DEVICES)" in shown
