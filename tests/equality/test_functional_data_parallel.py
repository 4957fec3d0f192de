"""`torchstrategy.data_parallel`: what torch's own tests of the function ask.

They run on any device, and there is a training.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from topologies import compute_devices
from torchstrategy import data_parallel
from torchstrategy.data_parallel import _of_calls


class Scaled(nn.Module):
    """Adds a number of its own to each row; some torch tests pass it by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        return self.layer(x) * scale


@pytest.fixture
def devices() -> list[torch.device]:
    return compute_devices(3)


@pytest.fixture
def net(devices: list[torch.device]) -> Scaled:
    torch.manual_seed(0)
    return Scaled().double().to(devices[0])


def rows(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(
        count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).to(device)


@pytest.mark.parametrize("count", [1, 2, 7, 9])
def test_outputs_and_gradients_are_those_of_the_module(
    net: Scaled, devices: list[torch.device], count: int
) -> None:
    inputs, twin = rows(count, devices[0]), copy.deepcopy(net)
    output = data_parallel(net, inputs, devices)
    output.square().sum().backward()
    twin(inputs).square().sum().backward()
    torch.testing.assert_close(output, twin(inputs), rtol=0, atol=1e-12)
    for one, other in zip(net.layer.parameters(), twin.layer.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)
    assert net.unused.grad is None


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)], ids=["tensor", "tuple"])
def test_inputs_may_be_a_tensor_or_a_tuple(
    net: Scaled, devices: list[torch.device], wrap: Any
) -> None:
    inputs = rows(5, devices[0])
    torch.testing.assert_close(data_parallel(net, wrap(inputs), devices), net(inputs))


def test_keyword_arguments_are_split_too(
    net: Scaled, devices: list[torch.device]
) -> None:
    inputs, scale = (
        rows(5, devices[0]),
        torch.arange(5.0, device=devices[0], dtype=torch.float64).reshape(5, 1),
    )
    output = data_parallel(net, (inputs,), devices, module_kwargs={"scale": scale})
    torch.testing.assert_close(output, net(inputs, scale))
    by_keyword = data_parallel(
        net, None, devices, module_kwargs={"x": inputs, "scale": 2.0}
    )
    torch.testing.assert_close(by_keyword, net(inputs, 2.0))


def test_one_device_calls_the_module_itself(
    net: Scaled, devices: list[torch.device]
) -> None:
    inputs = rows(5, devices[0])
    torch.testing.assert_close(data_parallel(net, inputs, devices[:1]), net(inputs))


def test_a_module_calls_it_in_its_forward_and_trains_as_in_plain_pytorch(
    devices: list[torch.device],
) -> None:
    class Net(nn.Module):
        def __init__(self, ids: list[torch.device] | None) -> None:
            super().__init__()
            self.features, self.head, self.ids = nn.Linear(3, 4), nn.Linear(4, 1), ids

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = (
                self.features(x)
                if self.ids is None
                else data_parallel(self.features, x, self.ids)
            )
            return self.head(hidden.tanh())

    found = []
    for ids in (None, devices):
        torch.manual_seed(0)
        net = Net(ids).double().to(devices[0])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for count in (7, 4, 1):
            optimizer.zero_grad()
            net(rows(count, devices[0])).square().mean().backward()
            optimizer.step()
        found.append(net.state_dict())
    for one, other in zip(*(state.values() for state in found), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_other_devices_may_follow(net: Scaled, devices: list[torch.device]) -> None:
    inputs = rows(6, devices[0])
    for ids in (devices, devices[:2], devices, [devices[0]] * 4):
        torch.testing.assert_close(data_parallel(net, inputs, ids), net(inputs))


def test_replicas_are_kept_between_calls(
    net: Scaled, devices: list[torch.device]
) -> None:
    data_parallel(net, rows(4, devices[0]), devices)
    first = _of_calls[net]
    data_parallel(net, rows(4, devices[0]), devices)
    assert _of_calls[net] is first


def test_nothing_is_kept_of_a_module_that_is_gone(devices: list[torch.device]) -> None:
    net = Scaled().to(devices[0])
    data_parallel(net, torch.ones(4, 3, device=devices[0]), devices).sum().backward()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_the_module_may_have_been_wrapped_before(
    net: Scaled, devices: list[torch.device]
) -> None:
    inputs = rows(6, devices[0])
    model = torchstrategy.DataParallel(net, devices)
    torch.testing.assert_close(model(inputs), data_parallel(net, inputs, devices))
    torch.testing.assert_close(model(inputs), net(inputs))


def test_in_a_replica_it_is_refused(net: Scaled, devices: list[torch.device]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return data_parallel(self.inner, x, ["cpu", "cpu"])

    with pytest.raises(RuntimeError, match="the batch is split already"):
        data_parallel(
            Outer().to(devices[0]), torch.ones(4, 3, device=devices[0]), devices
        )


def test_a_lazy_module_is_refused_by_name(devices: list[torch.device]) -> None:
    lazy = nn.Sequential(nn.LazyLinear(2)).to(devices[0])
    with pytest.raises(
        (TypeError, ValueError, RuntimeError), match=r"[Ll]azy|[Uu]ninitialized"
    ):
        data_parallel(lazy, torch.ones(4, 3, device=devices[0]), devices)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"runs a torch\.nn\.Module; got 'net', a str"):
        data_parallel("net", torch.ones(2), ["cpu", "cpu"])  # type: ignore[arg-type]
