"""A training goes on in another number of processes, and ends as it would have on one device."""

from __future__ import annotations

import pytest
import torch

import torchstrategy
from workers import resuming
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("steps", [(1, 2, 6), (2, 4, 7), (3, 5, 9)])
def test_a_training_goes_on_in_fewer_processes_and_in_one(steps: tuple[int, int, int]) -> None:
    expected = resuming.of_steps(torchstrategy.get_strategy(), None, steps[2])
    first, second, last = steps
    of_three = cluster(3).run(resuming.of_workers, 1, None, first)
    of_two = cluster(2).run(resuming.of_workers, 1, of_three[2], second)
    found = [
        resuming.of_steps(torchstrategy.MirroredStrategy(["cpu"] * 2), of_two[1], last),
        *cluster(3).run(resuming.of_workers, 1, of_two[1], last),  # or in more
    ]
    for one in found:
        assert difference(one["model"], expected["model"]) < 1e-12
        assert one["scheduler"]["_last_lr"] == expected["scheduler"]["_last_lr"]
        assert torch.equal(one["random"], expected["random"])
