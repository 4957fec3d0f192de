"""Where a distributed dataset stands: what counts as read, and in which iteration.

Its state is of that iteration.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from resumable import (
    LOADERS,
    PLACES,
    ROWS,
    STEPS,
    STRATEGIES,
    Make,
    Numbers,
    Remembers,
    Unbatched,
    batched,
    checkpoint,
    generator,
    goes_on,
    over,
    read,
    restore,
    rows_of,
    same,
    saved_and_loaded,
)

# What is counted


@pytest.mark.parametrize("depth", [1, 5])
def test_batches_that_were_read_ahead_and_not_handed_out_are_not_lost(
    depth: int,
) -> None:
    numbers = Numbers(40)
    dataset = over(
        batched(numbers), load_ahead=True, experimental_per_replica_buffer_size=depth
    )
    iterator = iter(dataset)
    for step in range(1, 15):
        read(iterator, 1)
        resumed = over(batched(Numbers(40)))
        resumed.load_state_dict(dataset.state_dict())
        assert rows_of(next(iter(resumed))) == [2 * step, 2 * step + 1]


def test_batches_that_workers_loaded_and_that_were_not_handed_out_are_not_lost() -> (
    None
):
    dataset = over(batched(Numbers(40), num_workers=2))
    iterator = iter(dataset)
    read(iterator, 3)
    resumed = over(batched(Numbers(40)))
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [6, 7]


@pytest.mark.parametrize(
    ("kind", "loads_again"),
    [
        ("in order", False),
        ("shuffled", False),
        ("generator within a batch sampler", False),
        ("subclass", False),
        ("subclass that iterates by itself", True),
    ],
)
def test_what_is_left_out_is_not_loaded(kind: str, loads_again: bool) -> None:
    dataset = over(LOADERS[kind]())
    read(iter(dataset), 4)
    loader = LOADERS[kind]()
    resumed = over(loader)
    resumed.load_state_dict(dataset.state_dict())
    assert loader.dataset.loaded == []
    iterator = iter(resumed)
    assert bool(loader.dataset.loaded) is loads_again
    next(iterator)
    assert len(loader.dataset.loaded) == (10 if loads_again else 2)


def test_single_elements_that_are_left_out_are_not_loaded() -> None:
    dataset, numbers = over(Unbatched(), STRATEGIES["one_device"]), Unbatched()
    read(iter(dataset), 4)
    resumed = over(numbers, STRATEGIES["one_device"])
    resumed.load_state_dict(dataset.state_dict())
    read(resumed, 1)
    assert numbers.loaded == [4]


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("a file that cannot be read")
        return super().__getitem__(index)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_broken_batch_is_not_read_again_after_the_next(ahead: bool) -> None:
    dataset = over(
        batched(Broken(), shuffle=True, generator=generator(2)), load_ahead=ahead
    )
    iterator = iter(dataset)
    found: list[list[int]] = []
    while len(found) < 4:
        try:
            found += read(iterator, 1)
        except KeyError:
            found.append([])
    resumed = over(batched(shuffle=True, generator=generator(2)))
    resumed.load_state_dict(dataset.state_dict())
    whole = read(over(batched(shuffle=True, generator=generator(2))))
    assert [] in found[:3]
    assert found + read(resumed) == [[] if 5 in batch else batch for batch in whole]


def test_a_batch_that_could_not_be_read_is_the_next_one_until_then() -> None:
    dataset = over(batched(Broken()))
    iterator = iter(dataset)
    read(iterator, 2)
    with pytest.raises(KeyError):
        next(iterator)
    resumed = over(batched())
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [4, 5]


def test_a_resumption_that_fails_can_be_tried_again() -> None:
    class Flaky(IterableDataset):
        fails = True

        def __iter__(self) -> Iterator[int]:
            for k in range(ROWS):
                if k == 3 and self.fails:
                    self.fails = False
                    raise OSError("the network is away")
                yield k

    dataset = over(LOADERS["in order"]())
    read(iter(dataset), 3)
    resumed = over(batched(Flaky()))
    resumed.load_state_dict(dataset.state_dict())
    with pytest.raises(OSError, match="the network is away"):
        iter(resumed)
    assert read(resumed) == [[6, 7], [8, 9], [10]]
    assert len(read(resumed)) == STEPS


# Where it stands


@pytest.mark.parametrize(
    "make", [LOADERS["two generators"], lambda: Remembers()], ids=["counted", "kept"]
)
def test_a_state_stays_as_it_was_taken(make: Make) -> None:
    dataset = over(make())
    iterator = iter(dataset)
    read(iterator, 2)
    state = dataset.state_dict()
    kept = copy.deepcopy(state)
    read(iterator)
    read(dataset)
    assert same(state, kept)


def test_to_ask_for_the_state_draws_nothing() -> None:
    dataset = over(LOADERS["two generators"]())
    before = torch.get_rng_state()
    dataset.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    expected, asked = read(over(LOADERS["two generators"]())), []
    for batch in dataset:
        dataset.state_dict()
        asked.append(rows_of(batch))
    assert asked == expected


def test_the_state_is_that_of_the_iteration_that_was_begun_last() -> None:
    dataset = over(LOADERS["in order"]())
    first = iter(dataset)
    read(first, 3)
    second = iter(dataset)
    read(second, 1)
    read(first, 1)
    resumed = over(LOADERS["in order"]())
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [2, 3]
    read(first)  # also its end is not that of the other
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [2, 3]


def test_an_iteration_that_was_broken_off_stands_where_it_was() -> None:
    dataset = over(LOADERS["in order"]())
    for batch in dataset:
        if 4 in rows_of(batch):
            break
    resumed = over(LOADERS["in order"]())
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [6, 7]
    assert rows_of(next(iter(dataset))) == [0, 1]


@pytest.mark.parametrize("kind", ["two generators", "shuffled", "list"])
@pytest.mark.parametrize("place", PLACES)
def test_what_was_loaded_is_the_state_until_one_iterates(kind: str, place: str) -> None:
    epochs, steps = PLACES[place]
    dataset = over(LOADERS[kind]())
    for _ in range(epochs):
        read(dataset)
    iterator = iter(() if steps is None else dataset)
    read(iterator, steps)
    state = dataset.state_dict()
    resumed = over(LOADERS[kind]())
    resumed.load_state_dict(state)
    assert same(resumed.state_dict(), state)
    unread = iter(() if steps is None else resumed)
    if steps:
        assert same(resumed.state_dict(), state)
    assert len(list(unread)) == (0 if steps is None else STEPS - steps)


def test_what_was_loaded_last_counts() -> None:
    dataset = over(LOADERS["generator of the loader"]())
    iterator = iter(dataset)
    states = [dataset.state_dict() for _ in read(iterator, 0) or range(1)]
    for _ in range(3):
        read(iterator, 1)
        states.append(dataset.state_dict())
    expected = read(iterator)
    resumed = over(LOADERS["generator of the loader"]())
    for state in (states[1], states[0], states[3]):
        resumed.load_state_dict(state)
    assert read(resumed) == expected


def test_it_can_be_turned_back_while_it_is_read() -> None:
    dataset = over(LOADERS["in order"]())
    iterator = iter(dataset)
    read(iterator, 1)
    state = dataset.state_dict()
    read(iterator, 2)
    dataset.load_state_dict(state)
    assert rows_of(next(iterator)) == [6, 7]  # which was begun before, and goes on
    assert rows_of(next(iter(dataset))) == [2, 3]


@pytest.mark.parametrize(
    "kind", ["shuffled", "two generators", "with replacement and a generator", "stream"]
)
def test_it_can_be_interrupted_again_and_again(kind: str) -> None:
    expected = read(over(LOADERS[kind]()))
    torch.manual_seed(0)
    dataset, found = over(LOADERS[kind]()), []
    saved: Any = None
    for _ in expected:
        torch.manual_seed(9)
        dataset = over(LOADERS[kind]())
        if saved is not None:
            restore(dataset, saved)
        else:
            torch.manual_seed(0)
        found += read(iter(dataset), 1)
        saved = checkpoint(dataset)
    assert found == expected


# Loaders that keep their own state


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_loader_that_keeps_its_state_is_asked_for_it(ahead: bool, place: str) -> None:
    goes_on(
        lambda: over(
            Remembers(), load_ahead=ahead, experimental_per_replica_buffer_size=5
        ),
        place,
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_that_keeps_its_state_reads_nothing_again(ahead: bool) -> None:
    dataset = over(Remembers(), load_ahead=ahead)
    iterator = iter(dataset)
    read(iterator, 3)
    loader = Remembers()
    resumed = over(loader)
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    assert read(resumed) == [[3, 3]]
    assert loader.read == [3]


def test_an_iterator_that_keeps_its_state_goes_on() -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Counter:
            return self

        def __next__(self) -> torch.Tensor:
            self.n += 1
            return torch.tensor([self.n])

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = state["n"]

    dataset = over(Counter())
    iterator = iter(dataset)
    assert read(iterator, 2) == [[1], [2]]
    state = dataset.state_dict()
    resumed = over(Counter())
    resumed.load_state_dict(state)
    assert read(resumed, 2) == [[3], [4]]
    dataset.load_state_dict(state)
    assert read(dataset, 2) == [[3], [4]]
