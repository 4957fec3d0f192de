"""Options of a run have the effect that they have in one process."""

from __future__ import annotations

from typing import Any

import pytest

import torchstrategy
from workers import options
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("runs_empty", [False, True])
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_gradients_are_added_up_where_the_run_says_so(
    workers: int, replicas: int, runs_empty: bool
) -> None:
    alone = options.of_options(torchstrategy.get_strategy(), None)
    for found in cluster(workers).run(
        summed, replicas, {"run_empty_replicas": runs_empty}
    ):
        assert difference(found, alone) < 1e-12


def summed(replicas: int, given: dict[str, Any]) -> Any:
    return options.of_workers(replicas, gradient_reduction="sum", **given)
