"""What is left when an iteration ends, however it ends."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from conditions import for_changes, for_releases, needs_fork, without_simulated_devices
from loaders import (
    AHEAD,
    HANG,
    ON_DEMAND,
    Loader,
    batch_numbers,
    both_ways,
    prefetchers,
    rows_of,
)
from topologies import central
from torchstrategy import InputOptions, OutOfRangeError
from torchstrategy._data import reading

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure", "nothing_left")


def has_ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(HANG)
    return not any(thread.is_alive() for thread in threads)


class Stop(Exception):
    """Raised by a step."""


def break_off(dataset: Any) -> None:
    for _ in dataset:
        break


def raise_in_the_step(dataset: Any) -> None:
    with pytest.raises(Stop):
        for _ in dataset:
            raise Stop


def drop(dataset: Any) -> None:
    iterator = iter(dataset)
    next(iterator)
    del iterator


def drop_unread(dataset: Any) -> None:
    iter(dataset)


def close(dataset: Any) -> None:
    iterator = iter(dataset)
    next(iterator)
    for _ in range(2):
        iterator.close()
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()


def close_unread(dataset: Any) -> None:
    iterator = iter(dataset)
    iterator.close()
    assert list(iterator) == []


def come_to_the_end(dataset: Any) -> None:
    iterator = iter(dataset)
    assert len(list(iterator)) == 6
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()
    iterator.close()


@both_ways
def test_to_close_an_iteration_is_not_to_come_to_its_end(options: InputOptions) -> None:
    strategy = central(2)
    dataset = strategy.experimental_distribute_dataset(Loader(), options)
    iterator = iter(dataset)
    assert batch_numbers(islice(iterator, 2)) == [0, 1]
    iterator.close()
    assert list(iterator) == []
    dataset.load_state_dict(dataset.state_dict())
    assert batch_numbers(dataset) == [2, 3, 4, 5]


class Cycle:
    """Holds itself, and something else."""

    def __init__(self, held: Any) -> None:
        self.itself = self
        self.held = held


def lose_in_a_cycle(dataset: Any) -> None:
    cycle = Cycle(iter(dataset))
    next(cycle.held)
    del cycle
    gc.collect()


ENDINGS = [
    break_off,
    raise_in_the_step,
    drop,
    drop_unread,
    close,
    close_unread,
    come_to_the_end,
    lose_in_a_cycle,
]


@pytest.mark.parametrize("end", ENDINGS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", ["ahead", "on demand", "workers"])
def test_however_an_iteration_ends_its_threads_and_workers_end_with_it(
    kind: str, end: Callable[[Any], None], no_collector: None
) -> None:
    loader = DataLoader(range(12), batch_size=2, num_workers=int(kind == "workers"))
    options = {"ahead": AHEAD, "on demand": ON_DEMAND, "workers": None}[kind]
    end(central(2).experimental_distribute_dataset(loader, options))
    assert not prefetchers()
    assert not multiprocessing.active_children()


def test_an_iterator_may_be_collected_on_its_readers_own_thread(
    no_collector: None,
) -> None:
    is_lost = threading.Event()

    def collect(k: int) -> None:
        if k == 2:
            assert is_lost.wait(HANG)
            gc.collect()

    cycle = Cycle(
        iter(central(2).experimental_distribute_dataset(Loader(before=collect), AHEAD))
    )
    next(cycle.held)
    gone, threads = weakref.ref(cycle.held), prefetchers()
    assert threads
    del cycle
    is_lost.set()
    assert has_ended(threads)
    assert gone() is None


def test_an_iterator_may_be_closed_by_its_loader() -> None:
    iterators: list[Any] = []

    def end(k: int) -> None:
        if k == 2:
            iterators[0].close()

    for options in (AHEAD, ON_DEMAND):
        loader, strategy = Loader(before=end), central(2)
        iterators[:] = [iter(strategy.experimental_distribute_dataset(loader, options))]
        found = batch_numbers(iterators[0])
        assert found == list(range(len(found)))
        assert loader.asked == [0, 1, 2]


def test_closing_does_not_wait_for_a_batch_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader may be in the middle of one."""
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)
    go_on = threading.Event()
    loader = Loader(before=lambda k: k == 1 and go_on.wait(HANG))
    iterator = iter(central(2).experimental_distribute_dataset(loader, AHEAD))
    next(iterator)
    assert loader.is_asked[1].wait(HANG)
    threads = prefetchers()
    del iterator
    assert any(thread.is_alive() for thread in threads)
    go_on.set()
    assert has_ended(threads)
    assert loader.asked == [0, 1]


def test_another_thread_may_close_an_iterator_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)
    go_on = threading.Event()
    loader = Loader(before=lambda k: k == 1 and go_on.wait(HANG))
    iterator = iter(central(2).experimental_distribute_dataset(loader, AHEAD))
    next(iterator)

    def close_it() -> None:
        assert loader.is_asked[1].wait(HANG)
        iterator.close()

    closer = threading.Thread(target=close_it)
    closer.start()
    assert list(iterator) == []
    closer.join()
    go_on.set()


@both_ways
def test_a_generator_cleans_up_when_nobody_can_ask_it_any_more(
    options: InputOptions, no_collector: None
) -> None:
    cleaned_up = []

    def batches() -> Iterator[torch.Tensor]:
        try:
            for _ in range(6):
                yield torch.ones(2)
        finally:
            cleaned_up.append(True)

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return batches()

    dataset = central(2).experimental_distribute_dataset(batches(), options)
    break_off(dataset)
    assert cleaned_up == []
    del dataset
    assert cleaned_up == [True]
    break_off(
        central(2).experimental_distribute_dataset(
            DataLoader(Stream(), batch_size=2), options
        )
    )
    assert cleaned_up == [True, True]


@pytest.mark.parametrize("options", [None, ON_DEMAND], ids=["ahead", "on demand"])
def test_a_new_iteration_of_persistent_workers_ends_the_one_before(
    options: InputOptions | None,
) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    strategy = central(2)
    dataset, other = (
        strategy.experimental_distribute_dataset(loader, options) for _ in range(2)
    )
    first = iter(dataset)
    assert rows_of(next(first)) == [0, 1]
    second = iter(dataset)
    assert rows_of(next(second)) == [0, 1]
    assert list(first) == []
    third = iter(other)
    assert list(second) == []
    assert [rows_of(step) for step in third] == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Gated(Dataset):
    """Rows of which one waits, in a loader worker, until it may go on."""

    def __init__(self) -> None:
        self.go_on = multiprocessing.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4:
            self.go_on.wait(HANG)
        return index


@for_changes
@needs_fork
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "dropped"])
def test_persistent_workers_serve_one_iteration_after_the_other(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)
    strategy, rows = central(2), Gated()
    loader = DataLoader(rows, batch_size=2, num_workers=1, persistent_workers=True)
    dataset = strategy.experimental_distribute_dataset(loader)
    first = iter(dataset)
    assert [rows_of(step) for step in islice(first, 2)] == [[0, 1], [2, 3]]
    readers = prefetchers()
    if not is_held:
        del first
    threading.Timer(0.01, rows.go_on.set).start()
    second = iter(dataset)
    assert not any(thread.is_alive() for thread in readers)
    assert [rows_of(step) for step in second] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def things_after_breaking_off(dataset: Any, times: int) -> int:
    """How many things the garbage collector knows."""
    for _ in range(times):
        break_off(dataset)
    gc.collect()
    return len(gc.get_objects())


@for_releases
@without_simulated_devices
def test_hundreds_of_iterators_that_are_broken_off_use_up_nothing() -> None:
    dataset = central(2).experimental_distribute_dataset([torch.ones(2)] * 6, AHEAD)
    before, after = (
        things_after_breaking_off(dataset, 50),
        things_after_breaking_off(dataset, 250),
    )
    assert not prefetchers()
    assert after - before < 100


@for_changes
@without_simulated_devices
def test_iterators_over_workers_that_are_broken_off_use_up_nothing() -> None:
    dataset = central(2).experimental_distribute_dataset(
        DataLoader(range(20), 2, num_workers=1)
    )
    before, after = (
        things_after_breaking_off(dataset, 2),
        things_after_breaking_off(dataset, 8),
    )
    assert not prefetchers()
    assert not multiprocessing.active_children()
    assert after - before < 100


def test_nothing_piles_up_between_the_threads_where_the_loader_is_the_faster_one() -> (
    None
):
    def piled_up() -> int:
        return sum(
            thing.qsize() for thing in gc.get_objects() if type(thing) is SimpleQueue
        )

    loader, before = Loader(200), piled_up()
    iterator = iter(central(2).experimental_distribute_dataset(loader, AHEAD))
    for k, _ in enumerate(islice(iterator, 150)):
        assert loader.is_asked[k + 2].wait(HANG)
    assert piled_up() < before + 20
    iterator.close()
