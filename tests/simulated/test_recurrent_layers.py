"""Recurrent layers keep their weights in one piece of memory, in replicas too.

cuDNN wants them so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy.testing import simulated_devices

SIM = simulated_devices()
STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "one device": lambda: torchstrategy.OneDeviceStrategy(SIM[0]),
    "central, one device twice": lambda: torchstrategy.CentralStorageStrategy(
        [SIM[0]] * 2, SIM[0]
    ),
    "central, two devices": lambda: torchstrategy.CentralStorageStrategy(
        SIM[:2], SIM[0]
    ),
    "central, parameters on the CPU": lambda: torchstrategy.CentralStorageStrategy(
        SIM[:2], "cpu"
    ),
    "mirrored": lambda: torchstrategy.MirroredStrategy(SIM[:2]),
}
KINDS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(4, 3, num_layers=2),
    "GRU": lambda: nn.GRU(4, 3, bidirectional=True),
    "projected": lambda: nn.LSTM(4, 3, proj_size=2),
    "without biases": lambda: nn.RNN(4, 3, bias=False),
}


class Net(nn.Module):
    """Its forward lays weights in one piece, as programs for `nn.DataParallel` do."""

    def __init__(self, recurrent: nn.RNNBase, flattens: bool = False) -> None:
        super().__init__()
        self.recurrent, self.flattens = recurrent, flattens

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.flattens:
            self.recurrent.flatten_parameters()
        outputs: torch.Tensor = self.recurrent(rows.unsqueeze(0))[0]
        return outputs.squeeze(0)


def pieces(layer: Any) -> int:
    """In how many pieces of memory the weights are.

    In one, they lie one after the other from its beginning.
    """
    found = {weight.untyped_storage().data_ptr() for weight in layer._flat_weights}
    if len(found) == 1:
        offset = 0
        for weight in layer._flat_weights:
            assert weight.storage_offset() == offset and weight.is_contiguous()
            offset += weight.numel()
    return len(found)


def pieces_in_replicas(strategy: torchstrategy.Strategy, net: Net) -> set[int]:
    return set(
        strategy.experimental_local_results(strategy.run(lambda: pieces(net.recurrent)))
    )


def new(
    kind: str, layer: str = "LSTM", flattens: bool = False
) -> tuple[torchstrategy.Strategy, Net]:
    torch.manual_seed(0)
    strategy = STRATEGIES[kind]()
    with strategy.scope():
        net = Net(KINDS[layer](), flattens)
    return strategy, net


def trained(
    net: Net, strategy: torchstrategy.Strategy | None = None, steps: int = 3
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    if strategy is not None:
        strategy.distribute_optimizer(optimizer)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()

    dtype = next(net.parameters()).dtype
    batches = [
        torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
        for i in range(steps)
    ]
    if strategy is None:
        for batch in batches:
            step(batch)
    else:
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=(batch,))
    return [parameter.detach().cpu() for parameter in net.parameters()]


def test_simulated_devices_lay_weights_in_one_piece_as_torch_does_on_cuda() -> None:
    layer = nn.LSTM(4, 3, num_layers=2)
    expected = [weight.detach().clone() for weight in layer._flat_weights]
    assert pieces(layer) == 8
    layer.to(SIM[0])
    assert pieces(layer) == 1
    for weight, other in zip(layer._flat_weights, expected, strict=True):
        assert torch.equal(weight.detach().cpu(), other)
    assert pieces(layer.cpu()) == 8


@pytest.mark.parametrize("layer", KINDS)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_weights_are_in_one_piece_in_all_replicas_and_stay_so(
    kind: str, layer: str
) -> None:
    strategy, net = new(kind, layer)
    assert pieces_in_replicas(strategy, net) == {1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(net, strategy)
    assert pieces_in_replicas(strategy, net) == {1}
    net.double()  # the copies get other memory
    assert pieces_in_replicas(strategy, net) == {1}
    found = trained(net, strategy)
    assert found[0].dtype == torch.float64 and pieces_in_replicas(strategy, net) == {1}


@pytest.mark.parametrize("flattens", [False, True])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_forward_that_lays_its_weights_trains_as_in_plain_torch(
    kind: str, flattens: bool
) -> None:
    """In a replica the weights lie well.

    If a step moved them, they would leave the memory that the user's have.
    """
    strategy, net = new(kind, flattens=flattens)
    torch.manual_seed(0)
    expected = trained(Net(KINDS["LSTM"]()))
    for one, other in zip(trained(net, strategy), expected, strict=True):
        torch.testing.assert_close(one, other)
    # Outside of a run it moves them.
    net(torch.ones(2, 4, device=next(net.parameters()).device))
    again = [parameter.detach().cpu() for parameter in net.parameters()]
    outputs = strategy.experimental_local_results(
        strategy.run(
            lambda: net(torch.ones(2, 4, device=next(net.parameters()).device)).detach()
        )
    )
    for output in outputs:
        torch.testing.assert_close(output.cpu(), outputs[0].cpu())
    assert all(
        map(
            torch.equal,
            again,
            [parameter.detach().cpu() for parameter in net.parameters()],
        )
    )


@pytest.mark.parametrize("kind", ["central, two devices", "mirrored"])
def test_weights_that_share_memory_keep_sharing_it(kind: str) -> None:
    """torch lays no such weights in one piece, either."""
    strategy, net = new(kind)
    layer: Any = net.recurrent
    layer.bias_hh_l0.data = layer.bias_ih_l0.data

    def share() -> bool:
        return bool(layer.bias_hh_l0.data_ptr() == layer.bias_ih_l0.data_ptr())

    assert set(strategy.experimental_local_results(strategy.run(share))) == {True}


def test_the_replicas_of_data_parallel_have_them_in_one_piece() -> None:
    seen = []

    class Shown(Net):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            seen.append(pieces(self.recurrent))
            return super().forward(rows)

    module = torchstrategy.DataParallel(
        Shown(KINDS["LSTM"](), flattens=True).to(SIM[0]), SIM[:2]
    )
    module(torch.ones(4, 4, device=SIM[0])).sum().backward()
    assert seen == [1, 1]
