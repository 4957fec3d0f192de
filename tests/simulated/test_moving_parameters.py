"""How parameters and gradients go from device to device.

In few large copies, and none of what did not change.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import comm

import torchstrategy
from conditions import for_changes
from torchstrategy._group import transfer
from torchstrategy.testing import Traffic, count_traffic, record_streams

OWNER, DEVICES = torch.device("sim:4"), ["sim:0", "sim:1"]


@pytest.fixture
def primitives(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Has simulated devices count as those that torch.nn.parallel's primitives know.

    Tells of their calls.
    """
    calls: list[tuple[str, list[str]]] = []

    def noted(name: str, devices_of: Any) -> None:
        plain = getattr(comm, name)

        def primitive(tensors: Any, *args: Any) -> Any:
            calls.append((name, list(map(str, devices_of(tensors, *args)))))
            return plain(tensors, *args)

        monkeypatch.setattr(comm, name, primitive)

    noted("broadcast_coalesced", lambda tensors, devices: devices)
    noted(
        "reduce_add", lambda tensors, destination: [tensor.device for tensor in tensors]
    )
    monkeypatch.setattr(transfer, "_KNOWN", frozenset({"cuda", "sim"}))
    return calls


def new(
    build: Any, **options: Any
) -> tuple[torchstrategy.Strategy, nn.Module, torch.optim.Optimizer]:
    strategy = torchstrategy.CentralStorageStrategy(DEVICES, OWNER, **options)
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return strategy, model, optimizer


def deep(layers: int = 100) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(rows), rows).backward()
        optimizer.step()

    return step


def counted(run: Any) -> Traffic:
    with count_traffic() as traffic:
        run()
    return traffic


def dealt(strategy: torchstrategy.Strategy, rows: int = 4) -> Any:
    (batch,) = strategy.experimental_distribute_dataset([torch.randn(rows, 4)])
    return batch


def routes(traffic: Traffic) -> dict[tuple[str, str], int]:
    return {
        (str(a), str(b)): n
        for (a, b), n in traffic.copies_by_route.items()
        if "cpu" not in (a.type, b.type)
    }


def test_two_hundred_small_parameters_travel_in_one_copy_each_way() -> None:
    strategy, model, optimizer = new(deep)
    batch, step = dealt(strategy), step_of(model, optimizer)
    strategy.run(step, args=(batch,))
    traffic = counted(lambda: strategy.run(step, args=(batch,)))
    assert routes(traffic) == {
        ("sim:4", "sim:0"): 1,
        ("sim:4", "sim:1"): 1,
        ("sim:0", "sim:4"): 1,
        ("sim:1", "sim:4"): 1,
    }
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert set(
        traffic.bytes_by_route[pair]
        for pair in traffic.copies_by_route
        if "cpu" not in map(str, pair)
    ) == {size}


def test_what_did_not_change_is_not_copied_and_what_is_frozen_never_again() -> None:
    strategy, model, optimizer = new(lambda: deep(4))
    batch, step = dealt(strategy), step_of(model, optimizer)

    def evaluate() -> Any:
        return strategy.run(lambda rows: model(rows).detach().sum(), args=(batch,))

    evaluate()
    assert [routes(counted(evaluate)) for _ in range(2)] == [{}, {}]
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    strategy.run(step, args=(batch,))
    traffic = counted(lambda: strategy.run(step, args=(batch,)))
    last = sum(p.numel() * p.element_size() for p in model[3].parameters())
    assert traffic.bytes_by_route[OWNER, torch.device("sim:1")] == last


def test_a_large_parameter_goes_by_itself_and_is_written_once() -> None:
    strategy, model, optimizer = new(
        lambda: nn.Sequential(nn.Linear(4, 40_000, bias=False), nn.Linear(40_000, 4))
    )
    batch, step = dealt(strategy), step_of(model, optimizer)
    strategy.run(step, args=(batch,))
    traffic = counted(lambda: strategy.run(step, args=(batch,)))
    assert routes(traffic)["sim:4", "sim:1"] == 3  # two large ones, and a bias


@pytest.mark.parametrize("owner", ["cpu", "sim:0", "sim:4"])
def test_nothing_is_read_on_a_stream_before_it_was_written_on_another(
    owner: str,
) -> None:
    strategy = torchstrategy.CentralStorageStrategy(DEVICES, owner)
    with strategy.scope():
        model = nn.Sequential(deep(3), nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters())
    batch, step = dealt(strategy), step_of(model, optimizer)
    with record_streams() as record:
        for _ in range(3):
            strategy.run(step, args=(batch,))
    assert record.races == []


def test_a_parameter_is_not_overwritten_while_a_replica_still_reads_it() -> None:
    strategy, model, _ = new(lambda: deep(3))
    batch = dealt(strategy)
    with record_streams() as record:
        for _ in range(3):
            strategy.run(lambda rows: model(rows).detach(), args=(batch,))
            with torch.no_grad():
                model[1].weight.add_(1.0)
    assert record.races == []


# ---- torch.nn.parallel's primitives, which know accelerators of one kind, each once


def weights(compute: list[str], owner: str) -> list[Any]:
    """Those of a model after three steps."""
    torch.manual_seed(0)
    strategy = torchstrategy.CentralStorageStrategy(compute, owner)
    with strategy.scope():
        model = nn.Sequential(deep(3), nn.BatchNorm1d(4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        strategy.run(step_of(model, optimizer), args=(dealt(strategy, 8),))
    return [value.tolist() for value in model.state_dict().values()]


@for_changes
def test_parameters_go_to_several_accelerators_in_one_broadcast(
    primitives: list[tuple[str, list[str]]],
) -> None:
    strategy, model, optimizer = new(deep)
    batch, step = dealt(strategy), step_of(model, optimizer)
    strategy.run(step, args=(batch,))
    primitives.clear()
    for _ in range(2):
        strategy.run(step, args=(batch,))
        # Nothing has changed.
        strategy.run(lambda rows: model(rows).detach(), args=(batch,))
    refreshes = [
        devices for name, devices in primitives if name == "broadcast_coalesced"
    ]
    assert refreshes == [["sim:4", "sim:0", "sim:1"]] * 2


@pytest.mark.parametrize("owner", ["sim:1", "sim:4", "cpu"])
def test_values_of_several_accelerators_are_added_by_one_reduction(
    primitives: list[tuple[str, list[str]]], owner: str
) -> None:
    """Its result is on one of them, and goes from there to where it is asked for."""
    strategy = torchstrategy.CentralStorageStrategy(["sim:1", "sim:2"], owner)
    values = strategy.run(
        lambda: (
            torch.ones(2)
            * (1 + torchstrategy.get_replica_context().replica_id_in_sync_group)
        )
    )
    total = strategy.reduce("sum", values, axis=None)
    assert primitives == [("reduce_add", ["sim:1", "sim:2"])]
    assert str(total.device) == owner and total.tolist() == [3, 3]


PLACES = {
    "parameters elsewhere": (["sim:0", "sim:1", "sim:2"], "sim:4"),
    "parameters with the first": (["sim:0", "sim:1", "sim:2"], "sim:0"),
    "parameters on the CPU": (["sim:0", "sim:1"], "cpu"),
    "a device twice": (["sim:0", "sim:1", "sim:1"], "sim:0"),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_model_is_the_same_with_and_without_the_primitives(
    where: str, request: pytest.FixtureRequest
) -> None:
    without = weights(*PLACES[where])
    primitives = request.getfixturevalue("primitives")
    assert weights(*PLACES[where]) == without
    devices = {
        device
        for name, called in primitives
        if name == "broadcast_coalesced"
        for device in called[1:]
    }
    assert (
        devices
        == {
            "parameters elsewhere": {"sim:0", "sim:1", "sim:2"},
            "parameters with the first": {"sim:1", "sim:2"},
            "parameters on the CPU": set(),
            "a device twice": set(),  # each copy goes by itself, which is no broadcast
        }[where]
    )
