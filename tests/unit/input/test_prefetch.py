"""When a loader is read, on which thread, and what is left when an iteration ends, however it ends."""

from __future__ import annotations

import contextvars
import gc
import multiprocessing
import os
import signal
import sys
import textwrap
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchstrategy
from processes import python
from topologies import SIMULATED, central, compute_devices
from torchstrategy import DistributedValues, InputOptions, OutOfRangeError, RunOptions, Strategy
from torchstrategy._core.thread_state import CallerState
from torchstrategy._input import prefetcher
from torchstrategy._input.splitting import in_equal_parts

ROOT = Path(torchstrategy.__file__).resolve().parents[1]
INPUT = os.path.dirname(prefetcher.__file__)

HANG = 20.0  # seconds: what these tests wait for takes milliseconds
AHEAD, ON_DEMAND = InputOptions(load_ahead=True), InputOptions(load_ahead=False)
both_ways = pytest.mark.parametrize("options", [AHEAD, ON_DEMAND], ids=["ahead", "on demand"])
quickly = settings(max_examples=40, deadline=None, derandomize=True, database=None)
needs_fork = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork is what Linux does")
has_no_devices = pytest.mark.skipif(bool(SIMULATED), reason="has nothing to do with devices, and takes long")
needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")


class Hang(BaseException):
    """A wait that would never have ended."""


@pytest.fixture(autouse=True)
def a_hang_is_a_failure() -> Iterator[None]:
    """Ends a test that hangs, so that it does not hang the suite."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(INPUT):
                raise Hang
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails the test that leaves a thread or a process behind."""
    before = set(threading.enumerate())
    yield
    if set(threading.enumerate()) - before or multiprocessing.active_children():
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG)
        assert not thread.is_alive(), f"{thread.name} is still there"
    assert not multiprocessing.active_children()


def prefetchers() -> set[threading.Thread]:
    """The threads of the library that read and carry."""
    names = ("torchstrategy-reader", "torchstrategy-prefetch")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def nothing(k: int) -> None:
    pass


class Loader:
    """An iterable of batches of two rows, which records when it is asked for one."""

    def __init__(self, batches: int = 6, before: Callable[[int], Any] = nothing) -> None:
        self.batches = batches
        self.before = before
        self.asked: list[int] = []
        self.is_asked = [threading.Event() for _ in range(batches)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._batch, range(self.batches))

    def _batch(self, k: int) -> torch.Tensor:
        self.asked.append(k)
        self.is_asked[k].set()
        self.before(k)
        return torch.tensor([2 * k, 2 * k + 1], device="cpu")


class Rows(Dataset):
    """0 to n - 1, with something that is done before a row is read."""

    def __init__(self, n: int, before: Callable[[int], Any] = nothing) -> None:
        self.n = n
        self.before = before

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.before(index)
        return index


def batch_number(step: Any) -> int:
    """Which of a Loader's batches it is, all of it and in order."""
    first, second = rows_of(step)
    assert second == first + 1
    return first // 2


def rows_of(step: Any) -> list[Any]:
    """The rows that all replicas were dealt of a value."""
    pieces = step.values if isinstance(step, DistributedValues) else [step]
    return torch.cat([piece.cpu() for piece in pieces]).tolist()


def batch_numbers(steps: Any) -> list[int]:
    return [batch_number(step) for step in steps]


def has_ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(HANG)
    return not any(thread.is_alive() for thread in threads)


# When it is read


@both_ways
def test_nothing_is_read_and_no_thread_begins_before_the_first_batch_is_asked_for(options: InputOptions) -> None:
    loader, before = Loader(), threading.enumerate()
    iterator = iter(central(2).experimental_distribute_dataset(loader, options))
    assert loader.asked == []
    assert set(threading.enumerate()) <= set(before)
    del iterator
    assert loader.asked == []


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_on_demand_a_batch_is_read_when_it_is_asked_for_and_on_the_thread_that_asks(replicas: int) -> None:
    threads: list[threading.Thread] = []
    loader, before = Loader(before=lambda k: threads.append(threading.current_thread())), threading.enumerate()
    iterator = iter(central(replicas).experimental_distribute_dataset(loader))
    for k in range(loader.batches):
        next(iterator)
        assert loader.asked == list(range(k + 1))
        assert set(threading.enumerate()) <= set(before)  # others may end meanwhile
    assert list(iterator) == []
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("replicas", [1, 3])
def test_ahead_as_many_batches_are_read_as_there_is_room_for(replicas: int, depth: int) -> None:
    options = InputOptions(load_ahead=True, experimental_per_replica_buffer_size=depth)
    for taken in range(1, 5):
        loader = Loader(20)
        iterator = iter(central(replicas).experimental_distribute_dataset(loader, options))
        for _ in range(taken):
            next(iterator)
            assert loader.is_asked[loader.asked[-1]].wait(HANG)
        assert loader.is_asked[taken + depth - 1].wait(HANG), "it does not read that far"
        iterator.close()
        assert loader.asked == list(range(taken + depth))


def test_ahead_the_elements_of_as_many_steps_are_read_as_there_is_room_for() -> None:
    loader = Loader(20)
    dataset = central(3).distribute_datasets_from_function(lambda context: loader, AHEAD)
    iterator = iter(dataset)
    next(iterator)
    assert loader.is_asked[8].wait(HANG)
    iterator.close()
    assert loader.asked == list(range(9))


def test_a_depth_that_no_loader_can_fill_is_as_good_as_any() -> None:
    options = InputOptions(load_ahead=True, experimental_per_replica_buffer_size=sys.maxsize)
    assert batch_numbers(central(2).experimental_distribute_dataset(Loader(), options)) == list(range(6))


def test_loader_workers_are_read_ahead_and_others_are_not_unless_one_says_so() -> None:
    strategy = central(2)
    for workers, options, is_ahead in [(0, None, False), (0, AHEAD, True), (1, None, True), (1, ON_DEMAND, False)]:
        iterator = iter(strategy.experimental_distribute_dataset(DataLoader(Rows(8), 2, num_workers=workers), options))
        next(iterator)
        assert bool(prefetchers()) is is_ahead
        iterator.close()


# The step and the loader, in order


@pytest.mark.parametrize("depth", [1, 2])
def test_ahead_the_next_batch_is_asked_for_before_the_step_ends(depth: int) -> None:
    strategy, log = central(2), []
    loader = Loader(before=lambda k: log.append(("read", k)))
    options = InputOptions(load_ahead=True, experimental_per_replica_buffer_size=depth)

    def step(k: int) -> None:
        if k + 1 < loader.batches:
            assert loader.is_asked[k + 1].wait(HANG)
        log.append(("step", k))

    for k, _ in enumerate(strategy.experimental_distribute_dataset(loader, options)):
        step(k)
    assert [what for what in log if what[0] == "step"] == [("step", k) for k in range(6)]
    assert all(log.index(("read", k + 1)) < log.index(("step", k)) for k in range(5))


def test_on_demand_the_next_batch_is_asked_for_after_the_step() -> None:
    strategy, log = central(2), []
    loader = Loader(before=lambda k: log.append(("read", k)))
    for k, _ in enumerate(strategy.experimental_distribute_dataset(loader)):
        log.append(("step", k))
    assert log == [(what, k) for k in range(6) for what in ("read", "step")]


# Random numbers


class Augmented(Dataset):
    """Rows with noise of torch's own generator."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2)


def test_on_demand_random_numbers_are_drawn_as_in_plain_pytorch(strategy: Strategy) -> None:
    loader = DataLoader(Augmented(), batch_size=3, shuffle=True)

    def drawn(batches: Any) -> list[Any]:
        torch.manual_seed(5)
        numbers = []
        for _ in range(2):
            for batch in batches:
                numbers += [rows_of(batch), F.dropout(torch.ones(8)).tolist()]
        return [*numbers, torch.rand(1).item()]

    assert drawn(strategy.experimental_distribute_dataset(loader)) == drawn(loader)


def test_ahead_a_loader_with_a_generator_of_its_own_leaves_the_steps_random_numbers_alone() -> None:
    strategy = central(2)

    def drawn(options: InputOptions | None) -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(range(9), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
        dataset = loader if options is None else strategy.experimental_distribute_dataset(loader, options)
        return [(rows_of(batch), F.dropout(torch.ones(8)).tolist()) for _ in range(2) for batch in dataset]

    assert drawn(AHEAD) == drawn(ON_DEMAND) == drawn(None)


# Every row, once and in order


SHAPES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda k: torch.tensor([k, k]),
    "number": lambda k: k,
    "dict": lambda k: {"x": torch.tensor([k]), "y": k},
    "nested": lambda k: ({"a": [torch.tensor(k)]}, (k, float(k))),
}


def leaves_of(batch: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(batch)


def check_stream(loader: Any, replicas: int, options: InputOptions | None) -> None:
    """Holds what a strategy deals out against what the loader yields."""
    strategy = central(replicas)
    expected = [leaves_of(batch) for batch in loader]
    steps = [leaves_of(step) for step in strategy.experimental_distribute_dataset(loader, options)]
    assert len(steps) == len(expected)
    for step, batch in zip(steps, expected, strict=True):
        for dealt_out, whole in zip(step, batch, strict=True):
            pieces = strategy.experimental_local_results(dealt_out)
            slices = in_equal_parts(replicas)(len(whole))
            assert [piece.tolist() for piece in pieces] == [whole[rows].tolist() for rows in slices]


@quickly
@given(
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(list(SHAPES)),
    st.booleans(),
)
def test_the_stream_of_the_loader_is_dealt_out_by_the_rule(
    rows: int, batch_size: int, replicas: int, drop_last: bool, shape: str, ahead: bool
) -> None:
    samples = [SHAPES[shape](k) for k in range(rows)]
    loader = DataLoader(samples, batch_size, drop_last=drop_last)
    check_stream(loader, replicas, AHEAD if ahead else ON_DEMAND)


@settings(quickly, max_examples=5)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.sampled_from(list(SHAPES)))
def test_the_stream_of_a_loader_with_workers_is_dealt_out_by_the_rule(
    rows: int, batch_size: int, replicas: int, drop_last: bool, shape: str
) -> None:
    samples = [SHAPES[shape](k) for k in range(rows)]
    check_stream(DataLoader(samples, batch_size, drop_last=drop_last, num_workers=2), replicas, None)


@both_ways
def test_a_replica_without_rows_sits_out_the_step_or_runs_with_none(options: InputOptions) -> None:
    strategy = central(2)
    found, whole = [], []
    for batch in strategy.experimental_distribute_dataset(DataLoader(range(5), batch_size=2), options):
        found.append([value.tolist() for value in strategy.run(lambda rows: rows + 1, args=(batch,)).values])
        everyone = strategy.run(lambda rows: rows + 1, args=(batch,), options=RunOptions(run_empty_replicas=True))
        whole.append([value.tolist() for value in everyone.values])
    assert found == [[[1], [2]], [[3], [4]], [[5]]]
    assert whole == [[[1], [2]], [[3], [4]], [[5], []]]


# Errors


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
def test_an_error_of_the_loader_comes_at_its_batch_as_itself_and_the_loader_goes_on(
    options: InputOptions, replicas: int, at: list[int]
) -> None:
    kinds = [lambda: ValueError("bad"), lambda: TwoArguments(1, "two"), lambda: KeyError("key")]
    errors: dict[int, BaseException] = {2 * k: kinds[i % 3]() for i, k in enumerate(at)}
    loader, strategy = DataLoader(Rows(10, raises_at(errors)), batch_size=2), central(replicas)
    plain = outcomes(iter(loader), torch.Tensor.tolist)
    dataset = strategy.experimental_distribute_dataset(loader, options)
    assert outcomes(iter(dataset), rows_of) == plain
    assert [plain[k] for k in at] == list(errors.values())


@both_ways
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()], ids=repr)
def test_what_is_no_exception_comes_at_its_batch_too(options: InputOptions, error: BaseException) -> None:
    loader, strategy = DataLoader(Rows(6, raises_at({2: error})), batch_size=2), central(2)
    found = outcomes(iter(strategy.experimental_distribute_dataset(loader, options)), rows_of)
    assert found == [[0, 1], error, [4, 5]]


@both_ways
def test_a_generator_that_raises_has_ended(options: InputOptions) -> None:
    error, strategy = ValueError("bad"), central(2)

    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        raise error

    found = outcomes(iter(strategy.experimental_distribute_dataset(batches(), options)), lambda step: "a batch")
    assert found == ["a batch", error]


@both_ways
def test_an_error_of_collate_comes_at_its_batch(options: InputOptions) -> None:
    error, strategy = ValueError("bad"), central(2)

    def collate(rows: list[int]) -> torch.Tensor:
        if rows[0] == 2:
            raise error
        return torch.tensor(rows)

    loader = DataLoader(range(6), batch_size=2, collate_fn=collate)
    found = outcomes(iter(strategy.experimental_distribute_dataset(loader, options)), rows_of)
    assert found == [[0, 1], error, [4, 5]]


@both_ways
def test_a_batch_that_cannot_be_dealt_out_is_refused_at_its_place(options: InputOptions) -> None:
    strategy = central(2)
    batches = [(torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(3)), (torch.ones(4), torch.ones(4))]
    dataset = strategy.experimental_distribute_dataset(batches, options)
    found = outcomes(iter(dataset), lambda step: len(rows_of(step[0])))
    assert (found[0], type(found[1]), found[2]) == (2, ValueError, 4)
    assert "batch[0] has 2 and batch[1] has 3" in str(found[1])


@both_ways
def test_what_was_read_of_a_step_before_an_error_is_not_lost(options: InputOptions) -> None:
    errors: dict[int, BaseException] = {3: ValueError("bad"), 4: KeyError("again")}
    loader, strategy = Loader(6, raises_at(errors)), central(2)
    dataset = strategy.distribute_datasets_from_function(lambda context: loader, options)
    found = outcomes(iter(dataset), rows_of)
    assert found == [[0, 1, 2, 3], errors[3], errors[4], [4, 5, 10, 11]]


@pytest.mark.parametrize("options", [None, ON_DEMAND], ids=["ahead", "on demand"])
def test_an_error_in_a_loader_worker_comes_at_its_batch_as_in_plain_pytorch(options: InputOptions | None) -> None:
    loader = DataLoader(Rows(8, raises_at({2: ValueError("bad")})), batch_size=2, num_workers=1)
    strategy = central(2)
    plain = outcomes(iter(loader), torch.Tensor.tolist)
    found = outcomes(iter(strategy.experimental_distribute_dataset(loader, options)), rows_of)
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

    def __init__(self, batches: int = 6, before: Callable[[int], Any] = nothing) -> None:
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
def test_an_error_that_is_dropped_keeps_nothing_alive(options: InputOptions, no_collector: None) -> None:
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


def test_an_error_of_a_loader_worker_that_nobody_came_for_keeps_no_process_alive(no_collector: None) -> None:
    loader = DataLoader(Rows(8, lambda index: raise_at_1(index // 2)), batch_size=2, num_workers=1)
    iterator = iter(central(2).experimental_distribute_dataset(loader))
    next(iterator)
    del iterator
    assert not prefetchers()
    assert not multiprocessing.active_children()


@both_ways
def test_no_batch_is_kept_that_was_handed_over(options: InputOptions, no_collector: None) -> None:
    loader = Watched(8)
    for _ in central(2).experimental_distribute_dataset(loader, options):
        batches = [thing for thing in loader.alive if isinstance(thing, torch.Tensor)]
        assert len(batches) <= 1 + (2 if options is AHEAD else 0)
        del batches
    del _
    assert loader.alive == []


# Endings


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


def test_an_iterator_may_be_collected_on_its_readers_own_thread(no_collector: None) -> None:
    is_lost = threading.Event()

    def collect(k: int) -> None:
        if k == 2:
            assert is_lost.wait(HANG)
            gc.collect()

    cycle = Cycle(iter(central(2).experimental_distribute_dataset(Loader(before=collect), AHEAD)))
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


def test_a_loader_that_is_in_the_middle_of_a_batch_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetcher, "_PATIENCE_S", 0.0)
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


def test_another_thread_may_close_an_iterator_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "_PATIENCE_S", 0.0)
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
def test_a_generator_cleans_up_when_nobody_can_ask_it_any_more(options: InputOptions, no_collector: None) -> None:
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
    break_off(central(2).experimental_distribute_dataset(DataLoader(Stream(), batch_size=2), options))
    assert cleaned_up == [True, True]


@pytest.mark.parametrize("options", [None, ON_DEMAND], ids=["ahead", "on demand"])
def test_a_new_iteration_of_persistent_workers_ends_the_one_before(options: InputOptions | None) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    strategy = central(2)
    dataset, other = (strategy.experimental_distribute_dataset(loader, options) for _ in range(2))
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


@needs_fork
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "dropped"])
def test_persistent_workers_serve_a_new_iteration_when_the_one_before_is_done_with_them(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "_PATIENCE_S", 0.0)
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


def test_a_thousand_iterators_that_are_broken_off_use_up_nothing() -> None:
    dataset = central(2).experimental_distribute_dataset([torch.ones(2)] * 6, AHEAD)
    before, after = things_after_breaking_off(dataset, 100), things_after_breaking_off(dataset, 900)
    assert not prefetchers()
    assert after - before < 100


def test_iterators_over_workers_that_are_broken_off_use_up_nothing() -> None:
    dataset = central(2).experimental_distribute_dataset(DataLoader(range(20), 2, num_workers=1))
    before, after = things_after_breaking_off(dataset, 2), things_after_breaking_off(dataset, 8)
    assert not prefetchers()
    assert not multiprocessing.active_children()
    assert after - before < 100


def test_nothing_piles_up_between_the_threads_where_the_loader_is_the_faster_one() -> None:
    def piled_up() -> int:
        return sum(thing.qsize() for thing in gc.get_objects() if type(thing) is SimpleQueue)

    loader, before = Loader(200), piled_up()
    iterator = iter(central(2).experimental_distribute_dataset(loader, AHEAD))
    for k, _ in enumerate(islice(iterator, 150)):
        assert loader.is_asked[k + 2].wait(HANG)
    assert piled_up() < before + 20
    iterator.close()


# Threads that cannot be had


@pytest.mark.parametrize("number", [0, 1])
def test_a_thread_that_cannot_be_started_is_told_and_tried_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, loader = central(2), Loader()
    iterator = iter(strategy.experimental_distribute_dataset(loader, AHEAD))
    start, tries = threading.Thread.start, []

    def fail(thread: threading.Thread) -> None:
        tries.append(thread)
        if len(tries) == number + 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    needed = 1 + (2 if torch.accelerator.is_available() else 0)
    if number < needed:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iterator)
    monkeypatch.undo()
    assert batch_numbers(iterator) == list(range(6))


def test_an_iterator_whose_thread_could_not_be_started_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(central(2).experimental_distribute_dataset(Loader(), AHEAD))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iterator)
    iterator.close()
    assert list(iterator) == []


def test_a_thread_that_cannot_do_its_work_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("no such device any more")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(CallerState, "run_in", fail)
    iterator = iter(central(2).experimental_distribute_dataset(Loader(), AHEAD))
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        assert caught.value is error
    assert not prefetchers()


# Ctrl-C


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Presses Ctrl-C, from any thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(k: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    yield press
    signal.signal(signal.SIGINT, before)


@needs_signals
def test_ctrl_c_while_a_batch_is_waited_for_loses_none(
    interrupted: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "_LOOK_UP_S", 0.01)  # it is often missed: the main thread is just about to wait
    strategy, is_wanted, is_interrupted = central(2), threading.Event(), threading.Event()

    def press(k: int) -> None:
        if k == 2:
            assert is_wanted.wait(HANG)
            interrupted(k)
            assert is_interrupted.wait(HANG)

    iterator = iter(strategy.experimental_distribute_dataset(Loader(before=press), AHEAD))
    found = batch_numbers(islice(iterator, 2))
    with pytest.raises(KeyboardInterrupt):
        is_wanted.set()
        next(iterator)
    is_interrupted.set()
    assert found + batch_numbers(iterator) == list(range(6))


@needs_signals
def test_ctrl_c_ends_the_threads_of_a_loop_that_it_ends(interrupted: Callable[[int], None]) -> None:
    is_pressed = threading.Event()

    def press(k: int) -> None:
        if k == 1:
            interrupted(k)
            is_pressed.set()

    with pytest.raises(KeyboardInterrupt):
        for _ in central(2).experimental_distribute_dataset(Loader(before=press), AHEAD):
            is_pressed.wait(HANG)
    gc.collect()  # the traceback of the interruption may hold the iterator in a cycle
    for thread in prefetchers():
        thread.join(HANG)  # it was told to end when its iterator went, and nobody waited for it
    assert not prefetchers()


def test_ctrl_c_anywhere_in_next_loses_no_batch_and_deals_none_twice() -> None:
    strategy = central(2)

    def found_when_interrupted_at(number: int) -> tuple[int, list[int]]:
        """How many moments there were, and the batches."""
        moments, found = 0, []
        iterator = iter(strategy.experimental_distribute_dataset(Loader(3), AHEAD))

        def profile(frame: types.FrameType, event: str, argument: Any) -> None:
            # Python runs a signal's handler when it enters a function of its own, and when it returns from one of C.
            # After `popleft` the batch is the consumer's.
            nonlocal moments
            if not frame.f_code.co_filename.startswith(INPUT) or event not in ("call", "c_return"):
                return
            if getattr(argument, "__name__", "") == "popleft":
                return
            moments += 1
            if moments == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

        while True:
            try:
                sys.setprofile(profile)
                step = next(iterator)
                sys.setprofile(None)
                found.append(batch_number(step))
            except StopIteration:
                return moments, found
            except KeyboardInterrupt:
                continue
            finally:
                sys.setprofile(None)

    moments, found = found_when_interrupted_at(0)
    assert moments > 30
    for number in range(1, moments + 1):
        assert found_when_interrupted_at(number)[1] == found == [0, 1, 2]


# Fork and spawn


def in_child(fn: Callable[[], Any]) -> int:
    """The exit code of a child that this process forks, for which it waits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: this process has other threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, HANG / 2)
        try:
            fn()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.parametrize("kind", ["ahead", "on demand", "workers"])
def test_a_forked_child_leaves_its_parents_iterator_alone(kind: str) -> None:
    strategy = central(2)
    loader = DataLoader(range(12), batch_size=2, num_workers=int(kind == "workers"))
    options = {"ahead": AHEAD, "on demand": ON_DEMAND, "workers": None}[kind]
    dataset = strategy.experimental_distribute_dataset(loader, options)
    iterators = [iter(dataset)]
    found = [rows_of(next(iterators[0]))]

    def drop() -> None:
        iterators.clear()
        gc.collect()

    def ask() -> None:
        if kind == "on demand":
            assert rows_of(next(iterators[0])) == [2, 3]
            return
        with pytest.raises(RuntimeError, match=r"^This iterator was made in another process, .* Iterate over "):
            next(iterators[0])

    def close() -> None:
        iterators[0].close()
        assert list(iterators[0]) == []

    def begin_anew() -> None:
        assert [rows_of(step) for step in dataset] == [[2 * k, 2 * k + 1] for k in range(6)]

    assert [in_child(act) for act in (drop, ask, close, begin_anew)] == [0, 0, 0, 0]
    found += [rows_of(step) for step in iterators[0]]
    assert found == [[2 * k, 2 * k + 1] for k in range(6)]


@pytest.mark.slow
@has_no_devices
@pytest.mark.parametrize("context", [pytest.param("fork", marks=needs_fork), "spawn"])
def test_loader_workers_may_be_forked_and_spawned(context: str) -> None:
    strategy = central(2)
    loader = DataLoader(range(8), batch_size=2, num_workers=1, multiprocessing_context=context)
    steps = [rows_of(step) for step in strategy.experimental_distribute_dataset(loader)]
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]


EXIT = """
    import torch, torchstrategy
    from torch.utils.data import DataLoader
    from torchstrategy._input import prefetcher

    prefetcher._PATIENCE_S = 1000.0  # who has to wait waits for too long
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    ahead = torchstrategy.InputOptions(load_ahead=True)

    def halfway(options=None, **kwargs):
        iterator = iter(strategy.experimental_distribute_dataset(DataLoader(range(20), 2, **kwargs), options))
        next(iterator)
        return iterator

    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself = cycle
    cycle.iterator = halfway(ahead)
    held = [
        halfway(),
        halfway(ahead),
        halfway(num_workers=1),
        halfway(num_workers=1, persistent_workers=True),
        iter(strategy.experimental_distribute_dataset(DataLoader(range(20), 2), ahead)),
    ]
    closed = halfway(ahead)
    closed.close()

    def fails(k):
        if k == 1:
            raise ValueError
        return torch.ones(2)

    failing = iter(strategy.experimental_distribute_dataset(map(fails, range(3)), ahead))
    next(failing)
"""


@pytest.mark.slow
@has_no_devices
def test_the_interpreter_exits_without_a_word_and_without_waiting() -> None:
    done = python("-W", "error", "-c", textwrap.dedent(EXIT), timeout=40, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


# What the reader wears


variable = contextvars.ContextVar("variable", default="what nobody set")


class Watching(TorchDispatchMode):
    """Records on which threads torch is asked for something."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.current_thread())
        return func(*args, **(kwargs or {}))


@both_ways
def test_the_loader_is_read_in_the_state_of_the_caller(options: InputOptions) -> None:
    worn: list[Any] = []
    threads: list[threading.Thread] = []

    def look(k: int) -> None:
        worn.append((variable.get(), torch.get_default_device().type, torch.is_grad_enabled()))
        threads.append(threading.current_thread())

    token = variable.set("what the caller set")
    with Watching() as mode, torch.no_grad(), torch.device("meta"):
        iterator = iter(central(2).experimental_distribute_dataset(Loader(1, look), options))
        next(iterator)
    variable.reset(token)
    iterator.close()
    assert worn == [("what the caller set", "cpu", False)]  # where data is read, whatever the default device is
    assert (threads[0] is threading.current_thread()) is (options is ON_DEMAND)
    assert threads[0] in mode.threads


@pytest.mark.parametrize("workers", [0, 1])
@both_ways
def test_a_loader_is_read_in_host_memory_in_a_scope(options: InputOptions, workers: int) -> None:
    """In the scope of a strategy on an accelerator, that is the default device: a loader could draw no seed there."""
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(8.0)),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        collate_fn=_stacked,
    )
    strategy = torchstrategy.MirroredStrategy(compute_devices(2))
    dataset = strategy.experimental_distribute_dataset(loader, options)
    for default in (strategy.scope(), torch.device("meta")):
        with default:
            seen = [strategy.gather(batch, axis=0) for batch in dataset]
        assert sorted(torch.cat(seen).tolist()) == list(range(8))
        assert not seen[0].is_meta
    with strategy.scope():
        assert dataset.element_spec.value_specs[0].dtype == torch.float32
        dataset.load_state_dict(dataset.state_dict())
        assert len(list(dataset)) == 2


@pytest.mark.skipif(not SIMULATED, reason="there is one kind of generators on the CPU")
def test_a_loader_that_draws_on_the_default_device_goes_on_doing_so() -> None:
    device = compute_devices(1)[0]
    generator = torch.Generator(device).manual_seed(0)
    loader: Any = torch.utils.data.DataLoader(range(8), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    strategy = torchstrategy.MirroredStrategy(compute_devices(2))
    with strategy.scope():
        seen = [strategy.gather(batch, axis=0).cpu() for batch in strategy.experimental_distribute_dataset(loader)]
    assert sorted(torch.cat(seen).tolist()) == list(range(8))


def _stacked(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows]) + torch.zeros(1)


def test_what_the_loader_sets_stays_with_the_reader() -> None:
    list(central(2).experimental_distribute_dataset(Loader(before=variable.set), AHEAD))
    assert variable.get() == "what nobody set"
