"""Which rows each worker reads, and in which order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchstrategy
from conditions import for_changes, for_releases
from workers import reading
from workers.cluster import cluster
from workers.trainings import Net, difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    "loader",
    [
        pytest.param({}, id="here"),
        pytest.param(
            {"num_workers": 1, "persistent_workers": True},
            id="in processes",
            marks=for_releases,
        ),
    ],
)
def test_each_worker_loads_its_own_rows_in_the_order_of_the_first(
    workers: int, replicas: int, loader: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = DataLoader(reading.Numbers(18), batch_size=8, shuffle=True)
    expected = [[batch.flatten().tolist() for batch in plain] for _ in range(2)]
    found = cluster(workers).run(of_loader, replicas, loader)
    for of_worker in found:
        assert of_worker["epochs"][0] == expected[0]
        assert all(
            sorted(chain.from_iterable(epoch)) == list(range(18))
            for epoch in of_worker["epochs"]
        )
        assert of_worker["epochs"] == found[0]["epochs"]
        assert of_worker["third"] == found[0]["third"]
        assert of_worker["resumed"] == of_worker["rest"] == found[0]["rest"]
    if not loader:
        # Two epochs of 8, 8 and 2 rows; a worker without rows reads those of the first
        # replica.
        assert [len(of_worker["loaded"]) for of_worker in found] == [
            2 * n for n in ([7, 7, 5] if workers == 3 else [10, 9])
        ]


def of_loader(replicas: int, loader: dict[str, Any]) -> dict[str, Any]:
    return reading.of_own_rows(replicas, **loader)


def test_a_position_is_good_for_any_number_of_workers() -> None:
    found = cluster(3).run(reading.of_own_rows, 1)[0]
    strategy = torchstrategy.MirroredStrategy(["cpu"] * 2)
    loader = DataLoader(reading.Numbers(18), batch_size=8, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(loader)
    dataset.load_state_dict(found["state"])
    assert reading.seen_of(strategy, dataset) == found["rest"]


def test_a_generator_of_the_loader_is_that_of_worker_0() -> None:
    loader = DataLoader(
        reading.Numbers(9),
        4,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    expected = [batch.flatten().tolist() for batch in loader]
    assert cluster(2).run(reading.of_generators, 1) == [expected] * 2


def test_what_is_no_loader_of_rows_is_read_by_all_and_said_so() -> None:
    for (streamed, warned), (listed, silent) in cluster(3).run(
        reading.of_whole_batches, 1
    ):
        assert streamed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert listed == [[0, 1, 2, 3, 4], [0]]
        assert (
            len(warned) == 1
            and "Every worker reads all of this DataLoader" in warned[0]
        )
        assert silent == []


def test_shares_of_rows_are_those_of_all_replicas() -> None:
    assert cluster(2).run(reading.of_shares, 2) == [[[4, 2]], [[1, 1]]]


@for_changes
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_workers_with_datasets_of_their_own_train_what_one_device_trains(
    mode: str,
) -> None:
    found = cluster(3).run(reading.of_own_datasets, 1, mode)
    assert [of_worker["contexts"] for of_worker in found] == [
        [(3, w, 3)] for w in range(3)
    ]
    assert all("dataset of its own" in of_worker["length"] for of_worker in found)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in range(max(reading.LENGTHS)):
        own = [reading.own_batches(w)[i] for w in range(3) if i < reading.LENGTHS[w]]
        of_each = [nn.functional.cross_entropy(model(x), y) for x, y in own]
        losses.append(sum(of_each).detach())
        optimizer.zero_grad()
        (sum(of_each) / len(own)).backward()
        optimizer.step()
    for of_worker in found:
        assert (of_worker["losses"] - torch.stack(losses)).abs().max() < 1e-12
        assert difference(of_worker["model"], model.state_dict()) < 1e-12


@pytest.mark.parametrize("replicas", [1, 2])
def test_workers_with_loaders_of_their_own_read_what_these_yield(replicas: int) -> None:
    everyone = cluster(3).run(reading.of_own_loaders, replicas)
    for rank, found in enumerate(everyone):
        assert found["seen"] == [[0, 3, 1, 4, 2, 5], [6]]
        assert found["resumed"] == [[6]]  # where two of the workers have nothing left
        assert set(found["loaded"]) == set(range(rank, 7, 3))
        assert found["shares"] == [2, 0][:replicas]
        assert found["of DistributedSampler"] == [[0, 3, 6, 1, 4, 0, 2, 5, 1]]
        assert "dataset of its own" in found["length"]


def test_a_worker_whose_dataset_is_empty_runs_the_steps_on_rows_of_another() -> None:
    (first, lent), (second, own) = cluster(2).run(reading.of_an_empty_dataset, 1)
    assert first == second == [[0], [0], [1], [1], [2], [2]]
    assert own == [([i], f"batch {i}") for i in range(3) for _ in range(2)]
    assert lent == [([0], "batch 0")] * 6


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["sharded", "from a function"])
def test_the_others_hear_of_a_row_that_cannot_be_loaded(
    kind: str, num_workers: int
) -> None:
    first, second = cluster(2).outcomes(reading.of_failing_rows, kind, num_workers)
    assert second.error is not None and second.error.startswith("OSError: ")
    assert first.error is not None and first.error.startswith(
        "WorkerError: worker 1 of 2 ("
    )
    assert "failed: OSError: " in first.error and "row 7 cannot be read" in first.error


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("sampler", "ValueError: The loader has a DistributedSampler"),
        ("rows", "ValueError: The loader made 3 rows of 2 samples"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(what: str, told: str) -> None:
    for outcome in cluster(2).outcomes(reading.refused, what):
        assert outcome.error is not None and outcome.error.startswith(told), outcome
