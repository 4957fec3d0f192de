"""state_dict and load_state_dict of a distributed dataset.

An iteration goes on where it was, with the next row.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from conditions import for_changes
from resumable import (
    LOADERS,
    PLACES,
    STEPS,
    STRATEGIES,
    Numbers,
    Unbatched,
    a_pipeline_for_each,
    generator,
    goes_on,
    over,
    read,
    rows_of,
    saved_and_loaded,
)
from torchstrategy import DistributedDataset

quickly = settings(max_examples=3, deadline=None, derandomize=True, database=None)


def with_workers(loader: Any, workers: int, **options: Any) -> Any:
    """A loader like this one, which has so many workers."""
    names = ("dataset", "collate_fn", "generator")
    chosen = {"sampler": loader.sampler, "batch_size": loader.batch_size}
    if isinstance(loader.dataset, IterableDataset):
        del chosen["sampler"]
    alike = {name: getattr(loader, name) for name in names}
    return type(loader)(**alike, **chosen, num_workers=workers, **options)


# Which draws beside the step, so in no certain order.
AHEAD = [kind for kind in LOADERS if kind != "drawn one by one"]


# Just as if it had not been interrupted


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_training_reads_what_an_uninterrupted_one_reads(
    kind: str, place: str
) -> None:
    goes_on(lambda: over(LOADERS[kind]()), place)


@pytest.mark.parametrize("kind", AHEAD)
def test_so_it_does_when_it_reads_ahead(kind: str) -> None:
    options = {"load_ahead": True, "experimental_per_replica_buffer_size": 5}
    goes_on(lambda: over(LOADERS[kind](), **options), "in the second epoch")


@for_changes
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("shuffled", "in the middle"),
        ("weighted", "before the first batch"),
        ("generator of the loader", "in the second epoch"),
        ("drawn one by one with a generator", "in the middle"),
        ("drawn at once, ready batches", "after a batch"),
        ("subclass that iterates by itself", "in the middle"),
    ],
)
def test_so_it_does_when_its_loader_has_workers(kind: str, place: str) -> None:
    workers = 2 if kind == "shuffled" else 1
    goes_on(
        lambda: over(with_workers(LOADERS[kind](), workers)), place, later=workers - 1
    )


@pytest.mark.parametrize("place", ["in the middle", "in the second epoch"])
def test_so_it_does_when_these_workers_outlive_an_epoch(place: str) -> None:
    def make() -> DistributedDataset:
        return over(
            with_workers(
                LOADERS["generator of the loader"](), 1, persistent_workers=True
            )
        )

    goes_on(make, place, later=0)


def test_so_it_does_when_the_loader_was_used_before() -> None:
    def make() -> DistributedDataset:
        loader = with_workers(LOADERS["shuffled"](), 1, persistent_workers=True)
        next(iter(loader))
        return over(loader)

    goes_on(make, "after a batch", later=0)


@pytest.mark.parametrize("place", PLACES)
def test_a_lone_replica_goes_on_with_single_elements(place: str) -> None:
    goes_on(lambda: over(Unbatched(), STRATEGIES["one_device"]), place)


@pytest.mark.parametrize("steps", [0, 1, 3, STEPS])
def test_a_generator_is_read_to_where_it_was(steps: int) -> None:
    def make() -> DistributedDataset:
        return over(torch.arange(2 * k, 2 * k + 2) for k in range(STEPS))

    dataset = make()
    iterator = iter(dataset)
    read(iterator, steps)
    resumed = make()
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    assert read(resumed) == read(iterator)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "kind", ["shuffled", "generator of the loader", "drawn at once, ready batches"]
)
def test_the_number_of_workers_may_be_another(
    kind: str, before: int, after: int
) -> None:
    dataset = over(with_workers(LOADERS[kind](), before))
    iterator = iter(dataset)
    torch.rand(2)
    read(iterator, 2)
    saved = saved_and_loaded(dataset.state_dict())
    again = over(with_workers(LOADERS[kind](), after))
    again.load_state_dict(saved)
    resumed = iter(again)
    expected = read(iterator)
    assert read(resumed, 1) == expected[:1]
    once_more = over(LOADERS[kind]())
    once_more.load_state_dict(again.state_dict())
    assert read(resumed) == read(once_more) == expected[1:]


@pytest.mark.parametrize("place", ["after a batch", "in the second epoch"])
def test_two_datasets_that_are_read_side_by_side_both_go_on(place: str) -> None:
    epochs, steps = PLACES[place]

    def make() -> list[DistributedDataset]:
        return [over(LOADERS["shuffled"]()), over(LOADERS["shuffled"]())]

    def read_both(iterators: Any, steps: int | None = None) -> list[Any]:
        return [
            (rows_of(a), rows_of(b))
            for a, b in itertools.islice(zip(*iterators, strict=True), steps)
        ]

    both = make()
    for _ in range(epochs):
        read_both(both)
    iterators = [iter(dataset) for dataset in both]
    read_both(iterators, steps)
    saved = [saved_and_loaded(dataset.state_dict()) for dataset in both]
    resumed = make()
    for dataset, state in zip(resumed, saved, strict=True):
        dataset.load_state_dict(state)
    assert read_both(resumed) == read_both(iterators)


# Another number of replicas


@pytest.mark.parametrize("after", STRATEGIES)
@pytest.mark.parametrize("before", STRATEGIES)
@quickly
@given(st.integers(0, 4), st.integers(1, 12), st.integers(1, 5), st.integers(0, 9))
def test_another_number_of_replicas_goes_on_with_the_very_next_row(
    before: str, after: str, epochs: int, rows: int, size: int, steps: int
) -> None:
    def make(strategy: str) -> DistributedDataset:
        loader = DataLoader(
            Numbers(rows), batch_size=size, shuffle=True, generator=generator()
        )
        return over(loader, STRATEGIES[strategy])

    dataset = make(before)
    for _ in range(epochs % 2):
        read(dataset)
    iterator = iter(dataset)
    head = read(iterator, steps)
    resumed = make(after)
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    tail = read(resumed)
    assert sorted(itertools.chain(*head, *tail)) == list(range(rows)) or steps > len(
        dataset
    )
    assert tail == (read(dataset) if steps > len(dataset) else read(iterator))


@quickly
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6))
def test_another_batch_size_goes_on_with_the_very_next_row(
    before: int, after: int, steps: int
) -> None:
    def make(size: int) -> DistributedDataset:
        return over(
            DataLoader(
                Numbers(24), batch_size=size, shuffle=True, generator=generator()
            )
        )

    dataset = make(before)
    iterator = iter(dataset)
    head = read(iterator, min(steps, len(dataset)))
    resumed = make(after)
    rows = sum(map(len, head))
    if rows % after:
        with pytest.raises(
            ValueError,
            match=(
                rf"stands at row {rows} .* with batch_size={after} no batch begins "
                r"there"
            ),
        ):
            resumed.load_state_dict(dataset.state_dict())
    else:
        resumed.load_state_dict(dataset.state_dict())
        assert list(itertools.chain(*read(resumed))) == list(
            itertools.chain(*read(iterator))
        )


def test_a_state_in_batches_of_unknown_size_is_not_counted_in_others() -> None:
    dataset = over(LOADERS["batch sampler"]())
    read(iter(dataset), 2)
    with pytest.raises(
        ValueError,
        match=(
            r"batch_size=None, and this one has "
            r"batch_size=2: .* cannot be known\. Make"
        ),
    ):
        over(LOADERS["shuffled"]()).load_state_dict(dataset.state_dict())


# Datasets from functions


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_dataset_from_a_function_goes_on_with_the_very_next_row(
    before: int, after: int, steps: int
) -> None:
    def make(replicas: int) -> DistributedDataset:
        return STRATEGIES[str(replicas)].distribute_datasets_from_function(
            lambda context: DataLoader(
                Numbers(22),
                context.get_per_replica_batch_size(4),
                shuffle=True,
                generator=generator(),
            )
        )

    dataset = make(before)
    iterator = iter(dataset)
    read(iterator, steps)
    resumed = make(after)
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    assert list(itertools.chain(*read(resumed))) == list(
        itertools.chain(*read(iterator))
    )


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(range(1, 5), repeat=2))
)
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_single_elements_from_a_function_are_counted(
    before: int, after: int, steps: int
) -> None:
    def make(replicas: int) -> DistributedDataset:
        return STRATEGIES[str(replicas)].distribute_datasets_from_function(
            lambda _: map(torch.tensor, range(7))
        )

    dataset = make(before)
    consumed = list(
        itertools.chain(
            *read(itertools.islice(iter(dataset), min(steps, -(-7 // before))))
        )
    )
    resumed = make(after)
    resumed.load_state_dict(dataset.state_dict())
    assert [*consumed, *itertools.chain(*read(resumed))] == list(range(7))


@pytest.mark.parametrize("place", PLACES)
def test_a_pipeline_for_each_replica_goes_on_in_each(place: str) -> None:
    goes_on(a_pipeline_for_each, place)
    goes_on(lambda: a_pipeline_for_each(STRATEGIES["3"]), place)


def test_a_pipeline_for_each_replica_is_for_as_many_replicas() -> None:
    dataset = a_pipeline_for_each()
    three = a_pipeline_for_each(STRATEGIES["3"])
    with pytest.raises(
        ValueError,
        match=(
            r"^The state is of a dataset that reads 2 "
            r"loaders, and this one reads 3: "
        ),
    ):
        three.load_state_dict(dataset.state_dict())
    assert sum(map(len, read(three))) == 18
