"""A function that counts each worker's tokens trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchstrategy
from conditions import for_changes
from workers import counting
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("workers", "replicas", "accumulates", "by_constructor"),
    [
        (2, 1, 1, False),
        (3, 1, 3, True),
        (2, 2, 3, False),
        (3, 1, 1, False),
        (2, 2, 1, True),
    ],
)
def test_the_training_is_that_of_plain_pytorch(
    workers: int, replicas: int, accumulates: int, by_constructor: bool
) -> None:
    alone = counting.trained(torchstrategy.get_strategy(), None, accumulates)
    for found in cluster(workers).run(
        counting.in_workers, replicas, accumulates, by_constructor
    ):
        assert difference(found, alone) < 1e-12


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2)])
def test_running_statistics_are_means_over_rows_all_the_same(
    workers: int, replicas: int
) -> None:
    alone = counting.statistics(torchstrategy.get_strategy(), None)
    for found in cluster(workers).run(counting.statistics_in_workers, replicas):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_who_has_no_rows_is_not_asked(workers: int, replicas: int) -> None:
    for i, of_workers in enumerate(
        zip(*cluster(workers).run(counting.asked, replicas), strict=True)
    ):
        rows = len(counting.VALID[i])
        assert sum(sum(seen) for _, seen in of_workers) == rows
        assert (
            sum(count for count, _ in of_workers) == min(rows, workers * replicas)
            or rows > 1
        )
        assert all(seen.count(0) == 0 for _, seen in of_workers)


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("answer", [float("nan"), -1, "three", [1, 2]], ids=repr)
def test_what_is_no_count_is_refused_in_all_workers_and_they_go_on(
    workers: int, replicas: int, answer: Any
) -> None:
    of_all = cluster(workers).run(counting.refused, replicas, answer)
    *_, (told, _) = of_all
    last = workers * replicas - 1
    kind = "TypeError" if isinstance(answer, (str, list)) else "ValueError"
    assert told.startswith(
        f"{kind}: examples=refused.<locals>.count of replica {last} returned {answer!r}"
    ), told
    for heard, _ in of_all[:-1]:
        assert (
            f"worker {workers - 1} of {workers} (" in heard
            and told.partition(": ")[2] in heard
        )
        assert heard.startswith(f"{kind}: ")
    assert len({total for _, total in of_all}) == 1
