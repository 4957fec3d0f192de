"""Gradients sent during backward are those that the step has when it ends."""

from __future__ import annotations

import math
import os

import pytest
import torch

from conditions import for_changes
from workers import overlapping
from workers.cluster import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "size", [1, math.inf], ids=["each gradient by itself", "all in one pack"]
)
@pytest.mark.parametrize("count", [6, 5, 1])
@pytest.mark.parametrize("name", [body.__name__ for body in overlapping.BODIES])
def test_the_sums_are_those_of_the_gradients_when_backward_ends(
    name: str, count: int, size: float
) -> None:
    if count == 1 and name == "part_by_part":
        pytest.skip("a single row cannot be split")
    expected = overlapping.of_plain(name, count, 2)
    told = cluster(2).run(overlapping.of_workers, name, count, size)
    for weights, _ in told:
        for own, plain in zip(weights, expected, strict=True):
            torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)
    assert (told[0][1] > 0) is (size == 1)


def test_gradients_that_the_user_keeps_stay_as_they_are() -> None:
    assert cluster(2).run(overlapping.of_kept_gradients) == [True, True]


@for_changes
@pytest.mark.parametrize("how", ["raises", "goes another way", "another waits"])
def test_a_worker_that_leaves_others_with_gradients_under_way_is_heard_of(
    how: str,
) -> None:
    if how != "raises" and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        pytest.skip(
            "torch waits for the other workers in each call itself, for as long as the "
            "timeout of the group"
        )
    for rank, told in enumerate(cluster(2).run(overlapping.of_failure, how)):
        if how == "raises":
            assert told.startswith(
                "ValueError" if rank else "WorkerError: worker 1 of 2"
            ), told
            assert "in backward" in told
        else:
            assert "The workers came to different synchronization points" in told
            assert (
                "all_reduce" in told and "the gradients of backward 1 of step" in told
            )
