"""All workers read the same rows in the same order, or hear that they do not.

Each worker draws the order of its own copy of the sampler. Seeded alike, two workers
whose dataset augments with `random` read other rows in the second epoch: 8 of 27 twice,
and 8 never.
"""

from __future__ import annotations

from typing import Any

import pytest

from conditions import for_releases
from workers import ordering
from workers.cluster import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ordering.DRAWS)
@pytest.mark.parametrize(
    ("workers", "replicas", "in_batches", "num_workers", "load_ahead"),
    [
        (3, 1, False, 0, None),
        pytest.param(2, 2, False, 1, None, marks=for_releases),
        (3, 1, True, 0, None),
    ],
)
def test_an_order_that_is_drawn_from_a_global_generator_is_that_of_worker_0(
    name: str,
    workers: int,
    replicas: int,
    in_batches: bool,
    num_workers: int,
    load_ahead: bool | None,
) -> None:
    found = cluster(workers).run(
        ordering.of_drawn, name, replicas, in_batches, num_workers, load_ahead
    )
    for of_worker in found:
        assert of_worker == found[0]
        for rows in [
            *of_worker["epochs"],
            of_worker.get("resumed", range(ordering.ROWS)),
        ]:
            assert sorted(rows) == list(range(ordering.ROWS))
    assert len({tuple(rows) for rows in found[0]["epochs"]}) == 2


TOLD = {
    "the length": (
        "ValueError: The workers read different datasets: worker 0 has a dataset with "
        "the number of rows 27, and worker 1 has 28"
    ),
    "the batch size": "worker 0 has the batch_size 6, and worker 1 has 7",
    "the number of batches": (
        "a loader with the number of batches 5, and worker 1 has 4"
    ),
    "a split": "worker 0 has a Subset whose indices have the digest ",
    "a split within": "worker 0 has a Subset whose indices have the digest ",
    "the class": "worker 0 has a dataset of the class Numbers, and worker 1 has list",
    "a generator of its own": "worker 0 has batch 0 with the indices [",
    "the second batch": (
        "worker 0 has batch 1 with the indices [6, 7, 8, 9, 11, 10], 6 in all\n  "
        "worker 1 has batch 1"
    ),
}


@pytest.mark.parametrize("only_gathers", [False, True], ids=["run", "gather"])
@pytest.mark.parametrize("name", ordering.DIFFERENT)
def test_rows_that_differ_are_refused_in_all_workers(
    name: str, only_gathers: bool
) -> None:
    if only_gathers and name in (
        "shapes",
        "streamed texts",
        "streamed integers",
        "streamed labels",
        "streamed dicts",
    ):
        pytest.skip("no tensor of rows")
    for told, total in cluster(2).run(ordering.of_different, name, only_gathers):
        kind = "RuntimeError: The workers have read different rows:\n"
        assert TOLD.get(name, kind) in told, told
        assert "worker 0 has" in told and "worker 1 has" in told
        assert total == 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_may_differ_is_not_refused(replicas: int) -> None:
    first: list[Any]
    first, second = cluster(2).run(ordering.of_alike, replicas)
    assert first == second
    assert [len(rows) for rows in first[0]] == [5, 5, 2] and first[0] != first[1]


def test_a_run_compares_rows_without_a_message_more() -> None:
    for *with_batch, without in cluster(2).run(ordering.num_messages):
        assert with_batch[-1] == without
