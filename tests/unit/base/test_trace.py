"""What a trace of torch's profilers shows of a run.

Nothing happens where no profiler is on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torchstrategy
from topologies import mirrored_with_copies
from torchstrategy._base.trace import traced

# What torch before 2.13 says of each first profile.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Warning. Profiler clears events:UserWarning"
)


def trace(call: Callable[[], object]) -> list[Any]:
    """What is recorded of a call, on all threads, in order."""
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=everywhere
    ) as profiler:
        call()
    return sorted(profiler.events() or [], key=lambda event: event.time_range.start)


def ranges(events: list[Any]) -> list[str]:
    """The names of our ranges, each indented below the one that it is in."""

    def depth(event: Any) -> int:
        above = event.cpu_parent
        return 0 if above is None else depth(above) + is_ours(above)

    return [
        "  " * depth(event) + event.name.removeprefix("torchstrategy.")
        for event in events
        if is_ours(event)
    ]


def is_ours(event: Any) -> bool:
    return event.name.startswith("torchstrategy.")


def training(strategy: torchstrategy.Strategy) -> Callable[[], object]:
    """A run of a step that trains."""
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    (batch,) = strategy.experimental_distribute_dataset([torch.ones(4, 2)])
    return lambda: strategy.run(train_step, args=(batch,))


def test_a_trace_of_a_step_in_two_replicas_can_be_read() -> None:
    run = training(torchstrategy.CentralStorageStrategy(["cpu"] * 2))
    run()
    events = trace(run)
    by_thread: dict[int, list[Any]] = {}
    for event in events:
        by_thread.setdefault(event.thread, []).append(event)
    caller, other = by_thread.values()
    assert ranges(caller) == [
        "run train_step",
        "  run train_step [replica 0]",
        "    accumulate gradients",
        "    wait at optimizer.step()",
        "      wait for replicas",
        "      synchronize at optimizer.step()",
        "        reduce gradients",
        "        update [SGD]",
        "        bring parameters",
        "  wait for replicas",
        "  reduce gradients",
    ]
    assert ranges(other) == [
        "run train_step [replica 1]",
        "  accumulate gradients",
        "  wait at optimizer.step()",
    ]
    for events in (caller, other):
        assert {"aten::addmm", "AddmmBackward0"} <= {event.name for event in events}


def test_replicas_that_update_by_themselves_are_named() -> None:
    run = training(mirrored_with_copies(2))
    names = [event.name for event in trace(run)]
    assert "torchstrategy.copy modules" in names
    assert "torchstrategy.update [SGD]" in names
    assert "torchstrategy.update [SGD] [replica 1]" in names


def test_one_device_shows_the_run_and_nothing_below() -> None:
    assert ranges(trace(training(torchstrategy.OneDeviceStrategy("cpu")))) == [
        "run train_step"
    ]


def test_a_batch_that_is_dealt_out_is_shown() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    dataset = strategy.experimental_distribute_dataset([torch.ones(4)])
    assert ranges(trace(lambda: next(iter(dataset)))) == ["split a batch"]


class Trainer:
    def step(self) -> None:
        """A method."""

    def __call__(self) -> None:
        """An object that can be called."""


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (Trainer().step, "Trainer.step"),
        (Trainer(), "Trainer"),
        (functools.partial(functools.partial(Trainer().step)), "Trainer.step"),
        (lambda: None, "<lambda>"),
        (torch.manual_seed, "manual_seed"),
        (nn.Linear(1, 1), "Linear"),
    ],
)
def test_the_step_has_the_users_name(fn: Callable[..., object], name: str) -> None:
    def enter() -> None:
        with traced("run {} [replica {}]", fn, 1):
            pass

    assert ranges(trace(enter)) == [f"run {name} [replica 1]"]


def test_ranges_of_a_step_that_fails_are_closed() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)

    def fail() -> None:
        torchstrategy.get_replica_context().all_reduce("sum", torch.ones(1))
        raise KeyError("mine")

    def run() -> None:
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                strategy.run(fail)
        torch.zeros(1)

    events = trace(run)
    assert [event.cpu_parent for event in events if event.name == "aten::zeros"] == [
        None
    ]
    assert [name for name in ranges(events) if "run fail" in name] == [
        *["run fail", "  run fail [replica 0]", "run fail [replica 1]"],
        *["run fail", "  run fail [replica 0]", "run fail [replica 1]"],
    ]


def test_a_profiler_that_does_not_see_the_replicas_is_noticed() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.warns(UserWarning, match="profile_all_threads=True"),
    ):
        strategy.run(lambda: None)
    with profile(activities=[ProfilerActivity.CPU]):  # there is no other thread
        torchstrategy.OneDeviceStrategy("cpu").run(lambda: None)
