"""Logical devices: each replica has one, so that code for several of them runs.

It asks for no more than there is.

What the errors say is in test_strategy_and_extended.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from torchstrategy import Strategy

ONE = torchstrategy.OneDeviceStrategy("cpu")
SIZES = st.lists(st.integers(0, 4), max_size=3)


@settings(deadline=None)
@given(shape=SIZES, parts=SIZES)
def test_a_split_into_more_than_one_part_is_refused(
    shape: list[int], parts: list[int]
) -> None:
    tensor = torch.ones(shape)
    if len(parts) == len(shape) and math.prod(parts) == 1:
        assert ONE.experimental_split_to_logical_devices(tensor, tuple(parts)) is tensor
    else:
        with pytest.raises(
            ValueError, match=r"Each replica has 1 logical device, number 0\.$"
        ):
            ONE.experimental_split_to_logical_devices(tensor, parts)


def test_gradients_flow_through_tensors_that_a_step_assigns_to_logical_devices(
    strategy: Strategy,
) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1, bias=False)

    def step() -> None:
        x = strategy.experimental_replicate_to_logical_devices(torch.ones(3, 2))
        x = strategy.experimental_split_to_logical_devices(x, [1, 1])
        strategy.experimental_assign_to_logical_device(model(x), 0).mean().backward()

    strategy.run(step)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1]]


def test_a_strategy_of_ones_own_has_a_logical_device_too() -> None:
    strategy, tensor = Strategy(torchstrategy.StrategyExtended()), torch.ones(2)
    assert strategy.experimental_assign_to_logical_device(tensor, 0) is tensor
