"""Snapshots see each change of what containers hold, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

import torchstrategy


def test_a_hook_that_a_step_puts_straight_into_an_empty_table_is_seen(
    several: torchstrategy.Strategy,
) -> None:
    # torch counts hooks when they are registered, and only then. The library relied on
    # this count.
    with several.scope():
        net = nn.Linear(1, 1)
    several.run(lambda: None)
    calls = []

    def step() -> None:
        net._forward_hooks[1_000_000] = lambda *arguments: calls.append(arguments)

    several.run(step)
    net(torch.ones(1, 1, device=net.weight.device))
    assert len(calls) == 1
