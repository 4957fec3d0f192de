"""Buffers and hooks that a step makes or removes."""

from __future__ import annotations

import pytest
import torch

import torchstrategy
from conditions import for_changes
from workers import making
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_buffers_that_a_step_makes_are_those_of_the_first_replica_of_all(
    workers: int, replicas: int
) -> None:
    alone = making.making(torchstrategy.MirroredStrategy(["cpu"] * workers * replicas))
    assert (
        "made_3" in alone["saved"]
        and "made_4" not in alone["saved"]
        and alone["warned"]
    )
    found_by = cluster(workers).run(making.of_workers, replicas)
    for found in found_by:
        assert found["saved"] == alone["saved"]
        # Nobody compares those of lone replicas.
        assert found["warned"] == (alone["warned"] if replicas > 1 else [])
        assert difference(found["numbers"], alone["numbers"]) < 1e-12
        assert all(
            torch.equal(value, found_by[0]["numbers"][name])
            for name, value in found["numbers"].items()
        )


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("made", "BatchNorm1d.more made"),
        ("removed", "BatchNorm1d.running_mean taken away"),
        ("a hook", "BatchNorm1d._forward_hooks made"),
    ],
)
def test_a_worker_that_makes_something_else_is_refused_and_nothing_is_written(
    what: str, told: str
) -> None:
    for found in cluster(2).run(making.of_one_only, what, 2):
        message, buffers, mean, count = found
        assert f"what the step did to buffers and hooks: '{told}'" in message
        assert "worker 0 has" in message and "worker 1 has" in message
        assert (buffers, mean, count) == (
            ["running_mean", "running_var", "num_batches_tracked"],
            [0.0, 0.0],
            0,
        )


@for_changes
@pytest.mark.parametrize("what", ["made", "removed"])
def test_a_lone_replica_that_makes_something_else_is_refused(what: str) -> None:
    for message, *_ in cluster(2).run(making.of_one_only, what, 1):
        assert "the buffers of the modules:" in message
        assert (
            "BatchNorm1d.more" if what == "made" else "BatchNorm1d.running_mean"
        ) in message
        assert "worker 0 has" in message and "worker 1 has" in message
