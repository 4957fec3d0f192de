"""Accelerators that can do less than CUDA devices.

Their module lacks functions, or they have one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy._base import devices as devices_of_core
from torchstrategy._group import copy_streams
from torchstrategy._group.copy_streams import Cargo
from torchstrategy._group.random_streams import generators_of
from torchstrategy.testing import (
    assert_same_as_plain,
    record_streams,
    simulated_devices,
)

SIM = simulated_devices()
MAKES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "one device": lambda: torchstrategy.OneDeviceStrategy("sim"),
    "central": lambda: torchstrategy.CentralStorageStrategy(SIM[:2], "cpu"),
    "central, one device twice": lambda: torchstrategy.CentralStorageStrategy(
        ["sim", "sim"], "sim"
    ),
    "mirrored": lambda: torchstrategy.MirroredStrategy(["sim:0", "sim:1"]),
}


def weights(
    make: Callable[[], torchstrategy.Strategy], ahead: bool = True
) -> list[Any]:
    """Those of a model with dropout, after some steps."""
    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(300, 300), nn.Dropout(0.5), nn.Linear(300, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return torch.rand(1)

    options = torchstrategy.InputOptions(load_ahead=ahead)
    drawn = []
    for batch in strategy.experimental_distribute_dataset(
        [torch.ones(8, 300)] * 3, options
    ):
        drawn += [
            value.cpu()
            for value in strategy.experimental_local_results(
                strategy.run(step, args=(batch,))
            )
        ]
    assert len({value.item() for value in drawn}) == len(drawn)
    return [*drawn, *(value.cpu() for value in model.state_dict().values())]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_a_module_with_few_functions_is_enough(
    make: Callable[[], torchstrategy.Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lacks, `torch.accelerator` says.

    Its functions for the state of random numbers may be missing, too.
    """
    expected = weights(make)
    module = torch.get_device_module("sim")
    used = {"get_rng_state", "set_rng_state", "manual_seed", "get_amp_supported_dtype"}
    # torch itself asks for these.
    used |= {"is_available", "_is_in_bad_fork", "manual_seed_all"}
    for name in set(vars(module)) - used:
        if not name.startswith("__"):
            monkeypatch.delattr(module, name)
    assert not hasattr(module, "current_device") and not hasattr(
        module, "default_generators"
    )
    for one, other in zip(weights(make), expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has simulated devices look as CUDA devices do before they are first used.

    There are no generators yet.

    Whoever asks for a random state uses the devices.
    """
    module: Any = torch.get_device_module("sim")
    generators, read, calls = (
        module.default_generators,
        module.get_rng_state,
        list[str](),
    )

    def get_rng_state(*args: Any) -> torch.Tensor:
        calls.append("get_rng_state")
        monkeypatch.setattr(module, "default_generators", generators)
        return read(*args)

    monkeypatch.setattr(module, "default_generators", ())
    monkeypatch.setattr(module, "get_rng_state", get_rng_state)
    return calls


@pytest.mark.parametrize("kind", MAKES)
def test_generators_that_are_not_there_before_the_first_use(
    kind: str, request: pytest.FixtureRequest
) -> None:
    expected = weights(MAKES[kind])
    calls = request.getfixturevalue("unused")
    for one, other in zip(weights(MAKES[kind]), expected, strict=True):
        assert torch.equal(one, other)
    # Where the only replica draws as the program does.
    assert calls or kind == "one device"


def test_a_generator_is_the_same_before_and_after_the_first_use(
    unused: list[str],
) -> None:
    (before,) = generators_of(SIM[1], with_cpu=False)
    state = before.get_state()
    (after,) = generators_of(SIM[1], with_cpu=False)
    assert isinstance(after, torch.Generator) and torch.equal(state, after.get_state())
    before.manual_seed(5)
    assert after.initial_seed() == 5
    before.set_state(state)
    assert torch.equal(state, after.get_state())


def test_the_comparison_with_plain_torch_needs_no_device_that_was_used(
    unused: list[str],
) -> None:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor
    ) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows.to(next(model.parameters()).device)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_same_as_plain(
        step,
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        [torch.ones(5, 4)] * 2,
        torchstrategy.MirroredStrategy(SIM[:2]),
    )
    assert unused


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "on demand"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_one_stream_and_no_pinned_memory_are_enough(
    make: Callable[[], torchstrategy.Strategy],
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on MPS: a new stream is the only one.

    Torch cannot pin memory for it, and `record_stream` is unknown.
    """
    expected = weights(make, ahead)

    def only(device: Any) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def refuse(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        raise NotImplementedError("not on this backend")

    def copies_by_itself(device: torch.device) -> bool:
        return False

    copy_streams._new_stream.cache_clear()
    monkeypatch.setattr(torch, "Stream", only)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    monkeypatch.setattr(torch.Tensor, "record_stream", refuse)
    for module in ("_group.transfer", "_data.reading"):
        monkeypatch.setattr(
            f"torchstrategy.{module}.copies_by_itself", copies_by_itself
        )
    try:
        with record_streams():
            found = weights(make, ahead)
    finally:
        copy_streams._new_stream.cache_clear()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_backend_that_makes_no_streams_copies_on_the_one_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: Any) -> torch.Stream:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", refuse)
    copy_streams._new_stream.cache_clear()
    try:
        assert copy_streams.copy_stream(
            SIM[1], Cargo.VALUES
        ) == torch.accelerator.current_stream(SIM[1])
    finally:
        copy_streams._new_stream.cache_clear()


def test_memory_is_pinned_for_devices_that_copy_it_by_themselves() -> None:
    can = {
        name: devices_of_core.copies_by_itself(torch.device(name, 0))
        for name in ("cpu", "mps", "cuda", "sim")
    }
    assert can == {"cpu": False, "mps": False, "cuda": True, "sim": True}
