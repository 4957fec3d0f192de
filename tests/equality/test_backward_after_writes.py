"""A backward runs after something was written on a model, or on nothing.

It may be its own in ways torch does not see, or another one.

In plain PyTorch a backward is refused only if a tensor that its forward has saved was
written since, and torch counted it. Replicas whose parameters have memory of their own
get values when anything may have been written. Values that had not changed were
written, too, which torch counted: in a GAN on two accelerators, with its parameters on
the CPU, `loss.backward()` ended in "modified by an inplace operation".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import only_in_turns, only_with_copies
from topologies import (
    central,
    central_with_copies,
    compute_devices,
    mirrored,
    mirrored_with_copies,
)
from torchstrategy.testing import assert_replicas_agree

F64 = {"dtype": torch.float64}
ROWS = 4
LARGE = 33_000  # numbers: more than 256 KiB, which are sent alone

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central": lambda: central(2),
    "central with copies": lambda: central_with_copies(2),
    "mirrored": lambda: mirrored(2),
    "mirrored with copies": lambda: mirrored_with_copies(3),
    "parameters on the CPU": lambda: torchstrategy.CentralStorageStrategy(
        compute_devices(2), "cpu"
    ),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


def batches(count: int) -> list[torch.Tensor]:
    return list(
        torch.randn(count, ROWS, 1, generator=torch.Generator().manual_seed(1), **F64)
    )


class Wide(nn.Module):
    """A model with a large and a small parameter, and large other tensors.

    One is a buffer, one is in a plain attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, LARGE, **F64))
        self.scale = nn.Parameter(torch.ones(1, **F64))
        self.register_buffer("mask", torch.linspace(0, 1, LARGE, **F64))
        self.constant = torch.linspace(1, 2, LARGE, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x * self.weight.square()).tanh() * self.mask * self.constant
        return wide.mean(1) * self.scale


class Models:
    """Two models with an optimizer each, and a third as an average of the first."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.one, self.other, self.average = Wide(), Wide(), Wide()
        self.of_one = torch.optim.SGD(self.one.parameters(), lr=0.1)
        self.of_other = optimizer(self.other.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.of_other, 0.5)


class ByData(torch.optim.Optimizer):
    """As optimizers of many packages are written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


Writes = Callable[[Models, torch.Tensor], None]


def once(function: Callable[[], Any]) -> None:
    """Calls a function once for all replicas, or in plain PyTorch."""
    torchstrategy.get_replica_context().merge_call(lambda _: function())


def update_other(models: Models, x: torch.Tensor) -> None:
    models.of_other.zero_grad()
    models.other(x).square().mean().backward()
    models.of_other.step()


def update_other_twice(models: Models, x: torch.Tensor) -> None:
    update_other(models, x)
    update_other(models, x)
    models.scheduler.step()


def average_by_data(models: Models, x: torch.Tensor) -> None:
    def write() -> None:
        for mean, parameter in zip(
            models.average.parameters(), models.one.parameters(), strict=True
        ):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    once(write)


def average_by_copies(models: Models, x: torch.Tensor) -> None:
    def write() -> None:
        with torch.no_grad():
            for mean, parameter in zip(
                models.average.parameters(), models.one.parameters(), strict=True
            ):
                mean.copy_(mean * 0.9 + parameter * 0.1)

    once(write)


def write_its_own_data(models: Models, x: torch.Tensor) -> None:
    """In plain PyTorch, the backward computes with the new values."""
    once(lambda: [parameter.data.mul_(0.5) for parameter in models.one.parameters()])


BETWEEN: dict[str, Writes] = {
    "the update of another model": update_other,
    "two updates and a scheduler": update_other_twice,
    "nothing": lambda models, x: once(lambda: None),
    "an average, through .data": average_by_data,
    "an average, by copy_": average_by_copies,
    "its own .data": write_its_own_data,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "one that writes .data": ByData,
}


def step(models: Models, x: torch.Tensor, between: Writes) -> torch.Tensor:
    models.of_one.zero_grad()
    loss = models.one(x).square().mean()
    between(models, x)
    loss.backward()
    models.of_one.step()
    with torch.no_grad():
        return models.one(x) + models.other(x) + models.average(x)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", BETWEEN)
def test_a_backward_may_come_after_writes_on_other_models(
    strategy: torchstrategy.Strategy, name: str, optimizer: str
) -> None:
    between = BETWEEN[name]
    plain = Models(OPTIMIZERS[optimizer])
    with strategy.scope():
        models = Models(OPTIMIZERS[optimizer])
    for x, batch in zip(
        batches(3), strategy.experimental_distribute_dataset(batches(3)), strict=True
    ):
        expected = step(plain, x, between)
        seen = strategy.gather(
            strategy.run(lambda x: step(models, x, between), args=(batch,)), axis=0
        )
        torch.testing.assert_close(seen.cpu(), expected, rtol=1e-10, atol=1e-12)
    for model in (models.one, models.other, models.average):
        assert_replicas_agree(strategy, model)


@pytest.mark.parametrize(
    "between",
    [update_other, lambda models, x: once(lambda: None)],
    ids=["update", "merge"],
)
def test_a_view_of_the_data_that_the_program_holds_is_no_write(
    strategy: torchstrategy.Strategy, between: Writes
) -> None:
    """On an accelerator, copies of a tensor are written at every occasion.

    They are if somebody holds the tensor's `.data`.
    """
    plain = Models(OPTIMIZERS["SGD"])
    with strategy.scope():
        models = Models(OPTIMIZERS["SGD"])
    held = [parameter.data for parameter in models.one.parameters()]
    for x, batch in zip(
        batches(3), strategy.experimental_distribute_dataset(batches(3)), strict=True
    ):
        expected = step(plain, x, between)
        seen = strategy.gather(
            strategy.run(lambda x: step(models, x, between), args=(batch,)), axis=0
        )
        torch.testing.assert_close(seen.cpu(), expected, rtol=1e-10, atol=1e-12)
    assert len(held) == 2


def test_the_results_of_several_runs_have_one_backward(
    strategy: torchstrategy.Strategy,
) -> None:
    """When the next run began, large tensors were written that nobody had changed.

    They were parameters, buffers and constants.
    """
    plain = Wide()
    with strategy.scope():
        model = Wide()

    expected, losses = [], []
    for x, batch in zip(
        batches(4), strategy.experimental_distribute_dataset(batches(4)), strict=True
    ):
        expected.append(plain(x).square().mean())
        losses.append(
            strategy.reduce(
                "mean",
                strategy.run(lambda x: model(x).square().mean(), args=(batch,)),
                None,
            )
        )
    torch.stack(expected).sum().backward()
    torch.stack(losses).sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.cpu(), other.grad, rtol=1e-10, atol=1e-12
        )


@only_with_copies
@pytest.mark.parametrize("name", ["scale", "mask", "constant"])
def test_a_backward_of_an_earlier_run_is_refused_after_a_write(
    strategy: torchstrategy.Strategy, name: str
) -> None:
    """Copies get new values when a run begins.

    What an earlier run has computed would get another gradient.
    """
    with strategy.scope():
        model = Wide()
    losses = []
    for k, batch in enumerate(strategy.experimental_distribute_dataset(batches(5))):
        losses.append(
            strategy.reduce(
                "sum", strategy.run(lambda x: model(x).sum(), args=(batch,)), None
            )
        )
        # Of what is large, a checksum is made when twice nothing was counted.
        if k == 3:
            tensor = getattr(model, name)
            with torch.no_grad():
                # A parameter may be shared.
                written = tensor.data if tensor.is_cpu and name != "scale" else tensor
                written.view(-1)[:1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.stack(losses).sum().backward()


@only_in_turns
@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "by .data"])
@pytest.mark.parametrize("name", ["scale", "mask", "constant"])
def test_a_backward_of_an_earlier_run_after_a_write_is_that_of_plain_pytorch(
    strategy: torchstrategy.Strategy, name: str, is_counted: bool
) -> None:
    """A write that is counted is refused, and one by `.data` takes the new numbers."""
    plain = Wide()
    with strategy.scope():
        model = Wide()

    def write(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            written = tensor if is_counted else tensor.data
            written.view(-1)[:1].add_(1)

    expected, losses = [], []
    for k, (x, batch) in enumerate(
        zip(
            batches(5),
            strategy.experimental_distribute_dataset(batches(5)),
            strict=True,
        )
    ):
        expected.append(plain(x).sum())
        losses.append(
            strategy.reduce(
                "sum", strategy.run(lambda x: model(x).sum(), args=(batch,)), None
            )
        )
        if k == 3:
            write(getattr(plain, name))
            write(getattr(model, name))
    for sums in (expected, losses):
        with (
            pytest.raises(RuntimeError, match="modified by an inplace operation")
            if is_counted
            else nullcontext()
        ):
            torch.stack(sums).sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        if not is_counted:
            torch.testing.assert_close(
                parameter.grad.cpu(), other.grad, rtol=1e-10, atol=1e-12
            )


def test_a_counted_write_between_forward_and_backward_is_refused_as_in_plain_pytorch(
    strategy: torchstrategy.Strategy,
) -> None:
    with strategy.scope():
        model = Wide()

    def write() -> None:
        with torch.no_grad():
            model.weight.mul_(0.5)

    def one_step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        once(write)
        loss.backward()

    (batch,) = strategy.experimental_distribute_dataset(batches(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        strategy.run(one_step, args=(batch,))
