"""`count_traffic` on a real boundary: what a step moves, to the byte.

It moves it from device to device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import torchstrategy
from problems import data, deal, mlp, mse, sgd
from torchstrategy.testing import simulated_devices
from torchstrategy.testing._counters import Traffic, count_traffic

SIM = simulated_devices()

PARAMETERS = 4 * 3 + 4 + 2 * 4 + 2  # numbers in the four parameters of the model
SIZE = 8 * PARAMETERS  # they are float64


def traffic_of(
    compute: list[int], parameter: int, batches: list[Any], steps_in_run: bool = True
) -> Traffic:
    """What the last of the batches, dealt out beforehand, costs."""
    strategy = torchstrategy.CentralStorageStrategy(
        [SIM[r] for r in compute], SIM[parameter]
    )
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if steps_in_run:
            optimizer.step()

    dealt = [deal(strategy, batch) for batch in batches]
    for batch in dealt[:-1]:
        strategy.run(step, args=(batch,))
    with count_traffic() as traffic:
        strategy.run(step, args=(dealt[-1],))
    return traffic


@pytest.mark.parametrize(
    ("compute", "parameter"),
    [([0, 1], 0), ([0, 1, 2, 3], 0), ([0, 1], 4), ([1, 2, 3], 2)],
)
def test_a_step_brings_gradients_to_the_parameters_and_parameters_to_the_replicas(
    compute: list[int], parameter: int
) -> None:
    traffic = traffic_of(compute, parameter, [data(8), data(8)])
    remote = [r for r in compute if r != parameter]
    routes = [
        *((SIM[r], SIM[parameter]) for r in remote),
        *((SIM[parameter], SIM[r]) for r in remote),
    ]
    assert traffic.copies_by_route == Counter(dict.fromkeys(routes, 1))
    assert traffic.bytes_by_route == Counter(dict.fromkeys(routes, SIZE))
    assert (traffic.copies, traffic.bytes) == (2 * len(remote), 2 * SIZE * len(remote))
    # From what came together to where it belongs.
    assert traffic.writes == 4 * len(remote)
    assert traffic.meetings == {"optimizer.step()": 1}


def test_gradient_accumulation_brings_no_parameters() -> None:
    traffic = traffic_of([0, 1], 0, [data(8), data(8)], steps_in_run=False)
    assert traffic.copies_by_route == {(SIM[1], SIM[0]): 1}
    assert not traffic.meetings


def test_a_replica_without_rows_sends_no_gradients() -> None:
    traffic = traffic_of([0, 1, 2], 0, [data(6), data(2)])
    assert traffic.copies_by_route == {
        (SIM[1], SIM[0]): 1,
        (SIM[0], SIM[1]): 1,
        (SIM[0], SIM[2]): 1,
    }


def test_dealing_a_batch_out_copies_each_row_once() -> None:
    strategy = torchstrategy.CentralStorageStrategy([SIM[0], SIM[1]], SIM[0])
    rows = torch.zeros(8, 3)
    with count_traffic() as traffic:
        deal(strategy, rows)
    cpu = torch.device("cpu")
    assert traffic.bytes_by_route == {
        (cpu, SIM[0]): 4 * 3 * 4,
        (cpu, SIM[1]): 4 * 3 * 4,
    }
