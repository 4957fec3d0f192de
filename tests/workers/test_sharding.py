"""Models that are sharded or wrapped already, in workers with one replica.

They get the numbers of one device, or a refusal.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases, some_of
from workers import sharding, sharding_more, unlike_shards
from workers.cluster import Cluster, cluster
from workers.exact_steps import differ
from workers.trainings import batches

pytestmark = pytest.mark.slow


@functools.cache
def of_plain_torch(train: sharding.Train) -> list[torch.Tensor]:
    return sharding.plainly(train)


@for_changes
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=for_releases)])
def test_steps_compute_the_numbers_of_plain_torch(workers: int) -> None:
    """Among the batches are uneven ones, and one of a single row.

    A gradient of local rows is in none of them.
    """
    cases = some_of(sharding.CASES[workers])
    found = cluster(workers).run(sharding.of_workers, cases)
    wrong = {}
    for case in cases:
        name, expected = sharding.name_of(case), of_plain_torch(case[1])
        most = max(differ(of_worker[name], expected) for of_worker in found)
        if not most < 1e-12:
            wrong[name] = most
    assert wrong == {}


def plainly(data: Any) -> list[torch.Tensor]:
    """What plain PyTorch comes to with some batches."""
    model = sharding.Net()
    step = sharding.ordinary(model, sharding.sgd(model))
    for batch in data:
        step(batch)
    return sharding.numbers_of(model, sharding.ordinary)


@pytest.mark.parametrize("make", [sharding.shard, sharding.wrapped])
def test_nothing_of_a_worker_without_rows_counts_and_nan_least(
    make: sharding.Make,
) -> None:
    for found in cluster(2).run(sharding_more.without_rows, make):
        assert differ(found, plainly(batches((1, 3, 1)))) < 1e-12


@for_changes
@pytest.mark.parametrize(
    ("workers", "make"),
    [
        (2, sharding.shard),
        (2, sharding.wrapped),
        (2, sharding.blocks_only),
        (4, sharding.hybrid),
    ],
)
def test_gradients_are_added_up_where_the_run_says_so(
    workers: int, make: sharding.Make
) -> None:
    for found in cluster(workers).run(sharding_more.summed, make):
        assert differ(found, plainly(batches())) < 1e-12


@for_changes
def test_low_precision_comes_near_to_the_numbers_of_one_device() -> None:
    model = sharding.Net()
    step = sharding.ordinary(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in batches((8, 3, 1)):
        step(batch)
    for found in cluster(2).run(sharding_more.in_low_precision):
        assert (
            1e-9 < differ(found, sharding.numbers_of(model, sharding.ordinary)) < 2e-2
        )


@for_changes
def test_workers_that_compute_one_model_draw_the_same_random_numbers() -> None:
    """In the first run those of plain PyTorch.

    See Note [Random streams of lone replicas].
    """
    first, *_ = sharding_more.drawn(torchstrategy.get_strategy(), lambda model: model)
    of_all = cluster(2).run(sharding_more.drawn_together)
    for found in of_all:
        assert differ(found[0], first) < 1e-12
        assert all(
            differ(one, other) == 0 for one, other in zip(found, of_all[0], strict=True)
        )


@for_changes
@pytest.mark.parametrize("make", [sharding.shard, sharding.wrapped])
def test_a_step_out_of_any_run_is_torchs_own(make: sharding.Make) -> None:
    data = [*batches(), batches()[0]]
    for found in cluster(2).run(sharding_more.step_outside, make):
        assert differ(found, plainly(data)) < 1e-12


@for_changes
@pytest.mark.parametrize("make", [sharding.shard, sharding.hybrid])
@pytest.mark.parametrize("after", [False, True], ids=["a new model", "a trained model"])
def test_a_training_goes_on_from_a_checkpoint(
    make: sharding.Make, after: bool, tmp_path: Path
) -> None:
    """On the same number of workers to the bit, and on another one but for rounding."""
    workers = 4 if make is sharding.hybrid else 2
    unbroken = cluster(workers).run(sharding_more.saved, tmp_path, make, 3)[0]
    for found in cluster(workers).run(sharding_more.loaded, tmp_path, make, 3, after):
        assert differ(found, unbroken) == 0
    for found in cluster(6 - workers).run(
        sharding_more.loaded, tmp_path, sharding.shard, 3, after
    ):
        assert differ(found, unbroken) < 1e-12


@for_changes
def test_a_worker_that_is_killed_is_named_by_those_that_wait_in_the_model() -> None:
    processes = Cluster(2)
    try:
        first, second = processes.outcomes(sharding_more.killed)
    finally:
        processes.end()
    assert second.error == "ended"
    assert (
        first.value.startswith("worker 1 of 2 (")
        and "is gone: the process has ended" in first.value
    )


@for_changes
def test_workers_that_compute_together_may_read_by_a_sampler() -> None:
    """Half of each batch of four rows is that of the first two workers."""
    x, y = batches()[0]
    picked = [[0, 2, 1, 3], [4, 6, 5, 7]]
    expected = plainly([(x[rows], y[rows]) for rows in picked])
    for worker, (rows, *found) in enumerate(
        cluster(4).run(sharding_more.read_together)
    ):
        assert torch.equal(rows, x[worker // 2 :: 2])
        assert differ(found, expected) < 1e-12


# What is refused

TOGETHER = (
    "RuntimeError: The workers 0{}1 do not average their gradients with one another: "
    "tensor parallelism"
)
WRAPPED = "RuntimeError: The step calls a DistributedDataParallel of Net which "


def test_what_backward_writes_on_buffers_is_that_of_the_first_worker() -> None:
    """The mark has left by then, and could not tell of it.

    The buffers are sent when the run ends.
    """
    assert cluster(2).run(sharding_more.buffers_of_backward) == [[1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("workers", "what", "told"),
    [
        (2, "split rows", TOGETHER.format(", ")),
        (2, "other rows", TOGETHER.format(" and ")),
        (
            2,
            "flat",
            (
                "TypeError: A FullyShardedDataParallel averages gradients as if all "
                "workers had the same number"
            ),
        ),
        (
            2,
            "in one worker",
            (
                "RuntimeError: Workers 0 and 1 have different models: worker 0 has "
                "Net.blocks.0.norm."
            ),
        ),
        (2, "a hook", WRAPPED + "has a communication hook, which would not be called"),
        (2, "static", WRAPPED + "has static_graph=True"),
        (2, "in a step", "RuntimeError: A model was sharded during strategy.run."),
        (
            2,
            "a write",
            (
                "RuntimeError: Worker 0 has written its part of Linear.weight in place "
                "3 times, and worker 1 4"
            ),
        ),
        (
            2,
            "several replicas",
            (
                "TypeError: FSDPNet.blocks.0.norm.weight is a DTensor, of which each "
                "process has a"
            ),
        ),
        (
            4,
            "pairs",
            (
                "RuntimeError: The workers {}, {} do not average their gradients with "
                "one another"
            ),
        ),
        (
            4,
            "unlike meshes",
            (
                "RuntimeError: In worker 0, the gradients of LayerNorm.weight become "
                "one over the process"
            ),
        ),
        (
            4,
            "some processes",
            WRAPPED + "averages over 2 processes, where the strategy has 4 workers",
        ),
        (
            4,
            "strangers",
            (
                "RuntimeError: Linear.weight is sharded, in worker 0, over the "
                "processes [0, 1, 2, 3], and"
            ),
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    workers: int, what: str, told: str
) -> None:
    messages = cluster(workers).run(unlike_shards.of_refusal, what)
    if what == "strangers":
        assert messages[2:] == ["", ""]  # in these, no strategy is at work
        messages = messages[:2]
    for worker, message in enumerate(messages):
        # Who still waits in an operation of the model when another worker refuses hears
        # of it by a WorkerError.
        assert told.format(worker % 2, worker % 2 + 2) in message, message
