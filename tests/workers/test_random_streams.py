"""Four replicas draw the same, whether they are in one process, in two or in four."""

from __future__ import annotations

import pytest
import torch

from workers import drawing
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("workers", "replicas"), [(2, 2), (4, 1)])
def test_four_replicas_draw_the_same_wherever_they_are(workers: int, replicas: int) -> None:
    alone = drawing.of_one_process()
    found = cluster(workers).run(drawing.of_workers, replicas)
    for of_worker in found:
        assert difference(of_worker, alone) < 1e-12
        assert torch.equal(of_worker["noises"], alone["noises"])
        assert torch.equal(of_worker["drawn"], alone["drawn"])
        assert torch.equal(of_worker["after"], alone["after"])
    assert len(set(alone["drawn"].flatten().tolist())) == alone["drawn"].numel()


def test_a_run_in_a_run_is_refused() -> None:
    for outcome in cluster(2).outcomes(drawing.of_a_nested_run):
        assert outcome.error is not None
        assert outcome.error.startswith("RuntimeError: strategy.run was called in a merge function")
