"""The streams on which values come to a device and leave it.

None waits for another without need.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm

import torchstrategy
from torchstrategy._base.streams import on_stream
from torchstrategy._group import transfer
from torchstrategy._group.copy_streams import Cargo, copy_stream
from torchstrategy.testing import record_streams, simulated_devices, virtual_time

SIM = simulated_devices()
sim: Any = torch.get_device_module("sim")
LARGE = 256  # a matrix of this width is sent alone
MATRIX = 4 * (LARGE + 1) * LARGE


def test_a_batch_does_not_wait_for_the_step_before_it() -> None:
    """The copy of parameters does.

    On one stream with it, the batch came after the step.
    """
    weights, parameters = (
        torch.empty(2**13, 2**13, device=SIM[1]),
        torch.ones(64, 64).pin_memory(),
    )
    target = torch.zeros(64, 64, device=SIM[1])
    with virtual_time("H100") as trace:
        weights.add_(1)  # a large tensor, as in the step
        transfer.write([transfer.Write([target], [parameters])])
        with on_stream(copy_stream(SIM[1], Cargo.BATCHES)):
            torch.zeros(8, device=SIM[1])
    of_step, on_stream_of_batches = (
        span for span in trace._timeline().spans if span.kind == "compute"
    )
    assert trace.copies[0].start >= of_step.end > on_stream_of_batches.end


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "on demand"])
def test_parameters_batches_and_gradients_that_travel_at_once_do_not_race(
    ahead: bool,
) -> None:
    strategy = torchstrategy.CentralStorageStrategy(SIM[:2], "cpu")
    with strategy.scope():
        net = nn.Sequential(nn.Linear(LARGE, LARGE + 1), nn.Linear(LARGE + 1, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.data = parameter.data.pin_memory()

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()

    options = torchstrategy.InputOptions(load_ahead=ahead)
    with record_streams() as record:
        for batch in strategy.experimental_distribute_dataset(
            [torch.ones(4, LARGE)] * 4, options
        ):
            strategy.run(step, args=(batch,))
    assert record.races == []


# ---- A broadcast, for which torch.nn.parallel has primitives


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has simulated devices count as known to the primitives; tells their calls."""
    calls: list[str] = []
    for name in ("broadcast", "broadcast_coalesced"):
        plain = getattr(comm, name)

        def noted(
            *args: Any, _name: str = name, _plain: Any = plain, **options: Any
        ) -> Any:
            calls.append(_name)
            return _plain(*args, **options)

        monkeypatch.setattr(comm, name, noted)
    monkeypatch.setattr(transfer, "_KNOWN", frozenset({"cuda", "sim"}))
    return calls


def new(dtype: torch.dtype = torch.float32) -> tuple[torchstrategy.Strategy, nn.Module]:
    strategy = torchstrategy.CentralStorageStrategy(SIM[:3], SIM[4])
    with strategy.scope():
        net = nn.Sequential(*[nn.Linear(LARGE, LARGE + 1) for _ in range(6)]).to(dtype)
    return strategy, net


def values_in_replicas(
    strategy: torchstrategy.Strategy, net: nn.Module
) -> list[list[torch.Tensor]]:
    in_replicas = strategy.run(
        lambda: [parameter.detach() for parameter in net.parameters()]
    )
    several = zip(*map(strategy.experimental_local_results, in_replicas), strict=True)
    return [list(of_one) for of_one in several]


def write_all(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)


def test_a_broadcast_needs_no_second_copy_of_the_model(broadcasts: list[str]) -> None:
    strategy, net = new()
    strategy.run(lambda: None)
    write_all(net)
    broadcasts.clear()
    before = [sim.memory_allocated(device) for device in SIM[:3]]
    for device in SIM[:3]:
        sim.reset_peak_memory_stats(device)
    strategy.run(lambda: None)
    assert (
        broadcasts.count("broadcast") == 6
        and broadcasts.count("broadcast_coalesced") == 1
    )
    for device, held in zip(SIM[:3], before, strict=True):
        # Of the small ones alone.
        assert sim.max_memory_allocated(device) - held < MATRIX


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
)
def test_what_is_broadcast_arrives(broadcasts: list[str], dtype: torch.dtype) -> None:
    strategy, net = new(dtype)
    strategy.run(lambda: None)
    for turn in range(2):
        write_all(net)
        if turn:  # the memory of NCCL's numbers is read as it is
            net[0].weight.data = net[0].weight.data.t().contiguous().t()
        for of_replica in values_in_replicas(strategy, net):
            for one, other in zip(of_replica, net.parameters(), strict=True):
                assert torch.equal(one.cpu(), other.detach().cpu())
    assert "broadcast_coalesced" in broadcasts


def test_a_broadcast_counts_as_a_write_on_the_copies(
    broadcasts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL writes memory that torch does not look at.

    A graph from before would compute wrong gradients.
    """
    plain = comm.broadcast

    def uncounted(tensor: torch.Tensor, *, out: list[torch.Tensor]) -> Any:
        with torch.autograd._unsafe_preserve_version_counter(tuple(out)):  # type: ignore[attr-defined]
            return plain(tensor, out=out)

    monkeypatch.setattr(comm, "broadcast", uncounted)
    source = torch.ones(LARGE, LARGE + 1, device=SIM[4])
    targets = [torch.zeros(LARGE, LARGE + 1, device=device) for device in SIM[:2]]
    transfer.write([transfer.Write([target], [source]) for target in targets])
    assert [target._version for target in targets] == [1, 1]
    assert all(target.eq(1).all() for target in targets)
