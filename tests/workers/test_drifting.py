"""What is written between two runs in some workers and not in others."""

from __future__ import annotations

import pytest

from workers import drifting
from workers.cluster import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("what", "name"),
    [
        (
            "a checkpoint in one worker",
            "Sequential.0.weight has other numbers in worker 1 than in worker 0",
        ),
        (
            "statistics in one worker",
            "Sequential.1.running_mean has other numbers in worker 1 than in worker 0",
        ),
        ("the same weights in one worker", ""),
        ("the same weights in all workers", ""),
    ],
)
def test_workers_that_go_on_with_other_values_are_refused(
    replicas: int, what: str, name: str
) -> None:
    """A script loaded its checkpoint on the first worker only.

    Every later step trained two models.
    """
    for found in cluster(2).run(drifting.after_writes, replicas, what):
        assert (name in found) if name else (found == ""), found
