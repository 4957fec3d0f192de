"""An error of the loader comes at its batch, as itself, and keeps nothing alive."""

from __future__ import annotations

import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from loaders import (
    AHEAD,
    HANG,
    ON_DEMAND,
    Loader,
    Rows,
    batch_numbers,
    both_ways,
    nothing,
    prefetchers,
    rows_of,
)
from topologies import central
from torchstrategy import InputOptions

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure", "nothing_left")


class TwoArguments(Exception):
    """Cannot be made again from its text."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)


def outcomes(iterator: Iterator[Any], shown: Callable[[Any], Any]) -> list[Any]:
    """All that an iterator yields and raises, until it ends."""
    found: list[Any] = []
    while True:
        try:
            found.append(shown(next(iterator)))
        except StopIteration:
            return found
        except BaseException as error:
            found.append(error)


def raises_at(errors: dict[int, BaseException]) -> Callable[[int], None]:
    def check(k: int) -> None:
        if k in errors:
            raise errors[k]

    return check


@both_ways
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("at", [[0], [2], [4], [1, 2], [0, 1, 2, 3, 4]], ids=str)
def test_an_error_of_the_loader_comes_at_its_batch(
    options: InputOptions, replicas: int, at: list[int]
) -> None:
    """It comes as itself, and the loader goes on after it."""
    kinds = [
        lambda: ValueError("bad"),
        lambda: TwoArguments(1, "two"),
        lambda: KeyError("key"),
    ]
    errors: dict[int, BaseException] = {2 * k: kinds[i % 3]() for i, k in enumerate(at)}
    loader, strategy = (
        DataLoader(Rows(10, raises_at(errors)), batch_size=2),
        central(replicas),
    )
    plain = outcomes(iter(loader), torch.Tensor.tolist)
    dataset = strategy.experimental_distribute_dataset(loader, options)
    assert outcomes(iter(dataset), rows_of) == plain
    assert [plain[k] for k in at] == list(errors.values())


@both_ways
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()],
    ids=repr,
)
def test_what_is_no_exception_comes_at_its_batch_too(
    options: InputOptions, error: BaseException
) -> None:
    loader, strategy = (
        DataLoader(Rows(6, raises_at({2: error})), batch_size=2),
        central(2),
    )
    found = outcomes(
        iter(strategy.experimental_distribute_dataset(loader, options)), rows_of
    )
    assert found == [[0, 1], error, [4, 5]]


@both_ways
def test_a_generator_that_raises_has_ended(options: InputOptions) -> None:
    error, strategy = ValueError("bad"), central(2)

    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        raise error

    found = outcomes(
        iter(strategy.experimental_distribute_dataset(batches(), options)),
        lambda step: "a batch",
    )
    assert found == ["a batch", error]


@both_ways
def test_an_error_of_collate_comes_at_its_batch(options: InputOptions) -> None:
    error, strategy = ValueError("bad"), central(2)

    def collate(rows: list[int]) -> torch.Tensor:
        if rows[0] == 2:
            raise error
        return torch.tensor(rows)

    loader = DataLoader(range(6), batch_size=2, collate_fn=collate)
    found = outcomes(
        iter(strategy.experimental_distribute_dataset(loader, options)), rows_of
    )
    assert found == [[0, 1], error, [4, 5]]


@both_ways
def test_a_batch_that_cannot_be_dealt_out_is_refused_at_its_place(
    options: InputOptions,
) -> None:
    strategy = central(2)
    batches = [
        (torch.ones(2), torch.ones(2)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(4), torch.ones(4)),
    ]
    dataset = strategy.experimental_distribute_dataset(batches, options)
    found = outcomes(iter(dataset), lambda step: len(rows_of(step[0])))
    assert (found[0], type(found[1]), found[2]) == (2, ValueError, 4)
    assert "batch[0] has 2 and batch[1] has 3" in str(found[1])


@both_ways
def test_what_was_read_of_a_step_before_an_error_is_not_lost(
    options: InputOptions,
) -> None:
    errors: dict[int, BaseException] = {3: ValueError("bad"), 4: KeyError("again")}
    loader, strategy = Loader(6, raises_at(errors)), central(2)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: loader, options
    )
    found = outcomes(iter(dataset), rows_of)
    assert found == [[0, 1, 2, 3], errors[3], errors[4], [4, 5, 10, 11]]


@pytest.mark.parametrize("options", [None, ON_DEMAND], ids=["ahead", "on demand"])
def test_an_error_in_a_loader_worker_comes_as_in_plain_pytorch(
    options: InputOptions | None,
) -> None:
    """At its batch."""
    loader = DataLoader(
        Rows(8, raises_at({2: ValueError("bad")})), batch_size=2, num_workers=1
    )
    strategy = central(2)
    plain = outcomes(iter(loader), torch.Tensor.tolist)
    found = outcomes(
        iter(strategy.experimental_distribute_dataset(loader, options)), rows_of
    )
    for both in (plain, found):
        assert isinstance(both[1], ValueError)
        assert "in DataLoader worker process 0" in str(both.pop(1))
    assert found == plain == [[0, 1], [4, 5], [6, 7]]


def test_after_an_error_the_loader_is_asked_again_only_when_the_consumer_asks() -> None:
    mended = []

    def check(k: int) -> None:
        if k >= 2 and not mended:
            raise ValueError("bad")

    loader, strategy = Loader(before=check), central(2)
    iterator = iter(strategy.experimental_distribute_dataset(loader, AHEAD))
    assert batch_numbers(islice(iterator, 2)) == [0, 1]
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    assert loader.asked == [0, 1, 2]
    mended.append(True)
    assert batch_numbers(iterator) == [3, 4, 5]


class Iteration(Iterator[torch.Tensor]):
    """An iterator that can be referred to weakly."""

    def __init__(self, batches: Iterator[torch.Tensor]) -> None:
        self.batches = batches

    def __next__(self) -> torch.Tensor:
        return next(self.batches)


class Watched(Loader):
    """A loader that sees its iterations and its batches go."""

    def __init__(
        self, batches: int = 6, before: Callable[[int], Any] = nothing
    ) -> None:
        super().__init__(batches, before)
        self._made: list[weakref.ref[Any]] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        iterator = Iteration(super().__iter__())
        self._made.append(weakref.ref(iterator))
        return iterator

    def _batch(self, k: int) -> torch.Tensor:
        batch = super()._batch(k)
        self._made.append(weakref.ref(batch))
        return batch

    @property
    def alive(self) -> list[Any]:
        return [thing for found in self._made if (thing := found()) is not None]


class Seen(Exception):
    """An error that one can see go."""


def raise_at_1(k: int) -> None:
    if k == 1:
        raise Seen


@both_ways
def test_an_error_that_is_dropped_keeps_nothing_alive(
    options: InputOptions, no_collector: None
) -> None:
    loader, strategy = Watched(before=raise_at_1), central(2)
    before = threading.enumerate()
    iterator = iter(strategy.experimental_distribute_dataset(loader, options))
    next(iterator)
    try:
        next(iterator)
    except Seen as error:
        gone = weakref.ref(error)
    assert gone() is None
    next(iterator)
    del iterator
    assert loader.alive == []
    assert set(threading.enumerate()) <= set(before)


def test_an_error_that_nobody_came_for_keeps_nothing_alive(no_collector: None) -> None:
    def raise_what_a_variable_holds(k: int) -> None:
        if k == 1:
            error = Seen()
            raise error

    loader, before = Watched(before=raise_what_a_variable_holds), threading.enumerate()
    for _ in central(2).experimental_distribute_dataset(loader, AHEAD):
        assert loader.is_asked[1].wait(HANG)
        break
    del _
    assert loader.alive == []
    assert set(threading.enumerate()) <= set(before)


def test_an_unread_error_of_a_loader_worker_keeps_nothing_alive(
    no_collector: None,
) -> None:
    loader = DataLoader(
        Rows(8, lambda index: raise_at_1(index // 2)), batch_size=2, num_workers=1
    )
    iterator = iter(central(2).experimental_distribute_dataset(loader))
    next(iterator)
    del iterator
    assert not prefetchers()
    assert not multiprocessing.active_children()


@both_ways
def test_no_batch_is_kept_that_was_handed_over(
    options: InputOptions, no_collector: None
) -> None:
    loader = Watched(8)
    for _ in central(2).experimental_distribute_dataset(loader, options):
        batches = [thing for thing in loader.alive if isinstance(thing, torch.Tensor)]
        assert len(batches) <= 1 + (2 if options is AHEAD else 0)
        del batches
    del _
    assert loader.alive == []
