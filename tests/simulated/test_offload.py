"""Parameters in the CPU's memory: how their values and gradients travel, in virtual time and with races checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy.testing import DeviceProfile, VirtualTrace, record_streams, simulated_devices, virtual_time

DEVICE = simulated_devices()[0]
WIDTH, LAYERS, STEPS = 1024, 12, 3
BYTES = LAYERS * WIDTH * WIDTH * 4


def make_model(is_pinned: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for parameter in net.parameters():
        parameter.data = parameter.data.pin_memory() if is_pinned else parameter.data
    return net


def trained(net: nn.Module, trace: VirtualTrace | None = None) -> list[torch.Tensor]:
    """The parameters after some steps with CentralStorage on the CPU."""
    strategy = torchstrategy.CentralStorageStrategy([DEVICE], "cpu")
    strategy.distribute_module(net)
    optimizer = strategy.distribute_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(16, WIDTH, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for _ in range(STEPS):
        if trace is not None:
            torch.accelerator.synchronize()
            trace.mark()
        strategy.run(step)
    return [parameter.detach().clone() for parameter in net.parameters()]


def trained_alone(net: nn.Module) -> list[torch.Tensor]:
    net.to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.ones(16, WIDTH, device=DEVICE)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
def test_gradients_travel_as_fast_as_the_memory_of_the_parameters_allows(is_pinned: bool) -> None:
    net = make_model(is_pinned)
    profile = DeviceProfile.named("H100")
    with record_streams(), virtual_time(profile) as trace:
        found = trained(net, trace)
    assert all(parameter.grad is not None and parameter.grad.is_pinned() == is_pinned for parameter in net.parameters())
    for ours, alone in zip(found, trained_alone(make_model(False)), strict=True):
        assert torch.equal(ours, alone)
    copies = trace.step(-1).copies
    assert {copy.is_pinned for copy in copies if copy.bytes > 2**20} == {is_pinned}


def test_a_backward_with_pinned_parameters_takes_little_more_than_the_link() -> None:
    net = make_model(True)
    strategy = torchstrategy.CentralStorageStrategy([DEVICE], "cpu")
    strategy.distribute_module(net)
    x = torch.ones(16, WIDTH, device=DEVICE)
    with record_streams(), virtual_time("H100", shapes_only=True) as trace:
        for _ in range(STEPS):
            torch.accelerator.synchronize()
            trace.mark()
            net.zero_grad()
            torch.autograd.graph.increment_version(list(net.parameters()))  # as an optimizer does
            strategy.run(lambda: net(x).square().mean().backward())
    link = 2 * BYTES / (trace.profile.pinned * 1e9)
    assert link < trace.step(-1).seconds < 1.5 * link  # 1.09 of it with the matrices of `benchmarks/accelerator.py`


Step = Callable[[nn.Module], None]


def run_backward(net: nn.Module) -> None:
    net(torch.ones(16, WIDTH, device=DEVICE)).square().mean().backward()


def run_two_backwards(net: nn.Module) -> None:
    run_backward(net)
    run_backward(net)


def clear_between(net: nn.Module) -> None:
    run_backward(net)
    net.zero_grad()
    run_backward(net)


def put_another(net: nn.Module) -> None:
    run_backward(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)


def differentiate_twice(net: nn.Module) -> None:
    loss = net(torch.ones(16, WIDTH, device=DEVICE)).square().mean()
    loss.backward(create_graph=True)


def keep_the_graph(net: nn.Module) -> None:
    loss = net(torch.ones(16, WIDTH, device=DEVICE)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "step",
    [run_backward, run_two_backwards, clear_between, put_another, differentiate_twice, keep_the_graph],
    ids=lambda step: step.__name__,
)
def test_a_gradient_that_left_early_is_used_only_if_the_step_left_it_as_it_was(step: Step, replicas: int) -> None:
    expected = make_model(False).to(DEVICE)
    step(expected)
    net = make_model(True)
    strategy = torchstrategy.CentralStorageStrategy([DEVICE] * replicas, "cpu")
    strategy.distribute_module(net)
    for _ in range(2):
        net.zero_grad()
        with record_streams():  # which raises an error for a race
            strategy.run(step, (net,))
        for ours, alone in zip(net.parameters(), expected.parameters(), strict=True):
            assert ours.grad is not None and alone.grad is not None
            assert torch.equal(ours.grad, alone.grad.cpu())


def test_gradients_leave_while_backward_makes_others() -> None:
    net = make_model(True)
    strategy = torchstrategy.CentralStorageStrategy([DEVICE], "cpu")
    strategy.distribute_module(net)
    with record_streams(), virtual_time("H100", shapes_only=True) as trace:
        strategy.run(run_backward, (net,))
    leaving = [copy for copy in trace.copies if copy.route.endswith("->cpu")]
    assert len(leaving) == LAYERS and leaving[0].start < trace.seconds - 0.9 * sum(copy.seconds for copy in leaving)
    assert leaving[0].where == leaving[-1].where and not any(copy.blocks for copy in leaving)


def test_a_run_that_fails_after_backward_keeps_no_gradient_of_it() -> None:
    net = make_model(True)
    strategy = torchstrategy.CentralStorageStrategy([DEVICE], "cpu")
    strategy.distribute_module(net)
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def step() -> None:
        net.get_parameter("0.weight").register_hook(lambda gradient: seen.append(weakref.ref(gradient)))
        run_backward(net)
        raise KeyError("after backward")

    with record_streams(), pytest.raises(KeyError):
        strategy.run(step)
    assert [reference() for reference in seen] == [None]
    assert all(parameter.grad is None for parameter in net.parameters())
