"""A training goes on in another number of processes, and ends as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases
from torchstrategy._group.workers import PACK
from workers import resuming
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@for_changes
@pytest.mark.parametrize("steps", [(1, 2, 6), (2, 4, 7), (3, 5, 9)])
def test_a_training_goes_on_in_fewer_processes_and_in_one(
    steps: tuple[int, int, int],
) -> None:
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


@pytest.mark.parametrize(
    ("workers", "replicas"), [(2, 1), pytest.param(3, 1, marks=for_releases), (2, 2)]
)
def test_a_checkpoint_of_workers_that_had_copies_goes_on(
    workers: int, replicas: int
) -> None:
    """It was saved by 0.1.0 in worker 1 of two with one replica each.

    That was after 4 steps, within the second epoch.
    """
    saved = torch.load(
        Path(__file__).with_name("saved_with_copies.pt"), weights_only=True
    )
    expected = resuming.of_steps(torchstrategy.get_strategy(), None, 9)
    found = cluster(workers).run(resuming.of_workers, replicas, saved, 9)
    for one in [
        *found,
        resuming.of_steps(torchstrategy.OneDeviceStrategy("cpu"), saved, 9),
    ]:
        assert difference(one["model"], expected["model"]) < 1e-12
        assert one["scheduler"]["_last_lr"] == expected["scheduler"]["_last_lr"]
        assert torch.equal(one["random"], expected["random"])


@for_changes
@pytest.mark.parametrize("pack", [200, PACK], ids=["several packs", "one pack"])
@pytest.mark.parametrize("count", [3, pytest.param(4, marks=for_releases)])
@pytest.mark.parametrize("kind", resuming.KINDS)
def test_a_training_that_begins_anew_has_the_same_bits(
    kind: str, count: int, pack: int
) -> None:
    """Three workers that went on from a checkpoint ended with other last bits.

    Those that had not stopped had different ones.

    The first step sent gradients in another order than later steps, and three summands
    that are added up in another order have another sum.
    """
    assert (
        cluster(count).run(resuming.unlike_after_restarts, kind, pack) == [[]] * count
    )
