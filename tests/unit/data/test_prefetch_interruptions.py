"""Threads that cannot start, Ctrl-C, fork and exit while a loader is read.

It is the exit of the interpreter.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchstrategy
from conditions import (
    for_changes,
    for_releases,
    needs_fork,
    needs_signals,
    without_simulated_devices,
)
from loaders import (
    AHEAD,
    HANG,
    INPUT,
    ON_DEMAND,
    Loader,
    batch_number,
    batch_numbers,
    prefetchers,
    rows_of,
)
from processes import python
from topologies import central
from torchstrategy._base.context import CallerState
from torchstrategy._data import reading

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure", "nothing_left")


ROOT = Path(torchstrategy.__file__).resolve().parents[1]


# Threads that cannot be had


@pytest.mark.parametrize("number", [0, 1])
def test_a_thread_that_cannot_be_started_is_told_and_tried_again(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_iterator_whose_thread_could_not_be_started_can_be_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterator = iter(central(2).experimental_distribute_dataset(Loader(), AHEAD))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iterator)
    iterator.close()
    assert list(iterator) == []


def test_a_thread_that_cannot_do_its_work_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("no such device any more")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(CallerState, "run_on_other_thread", fail)
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
    # It is often missed: the main thread is just about to wait.
    monkeypatch.setattr(reading, "_LOOK_UP_S", 0.01)
    strategy, is_wanted, is_interrupted = (
        central(2),
        threading.Event(),
        threading.Event(),
    )

    def press(k: int) -> None:
        if k == 2:
            assert is_wanted.wait(HANG)
            interrupted(k)
            assert is_interrupted.wait(HANG)

    iterator = iter(
        strategy.experimental_distribute_dataset(Loader(before=press), AHEAD)
    )
    found = batch_numbers(islice(iterator, 2))
    with pytest.raises(KeyboardInterrupt):
        is_wanted.set()
        next(iterator)
    is_interrupted.set()
    assert found + batch_numbers(iterator) == list(range(6))


@needs_signals
def test_ctrl_c_ends_the_threads_of_a_loop_that_it_ends(
    interrupted: Callable[[int], None],
) -> None:
    is_pressed = threading.Event()

    def press(k: int) -> None:
        if k == 1:
            interrupted(k)
            is_pressed.set()

    with pytest.raises(KeyboardInterrupt):
        for _ in central(2).experimental_distribute_dataset(
            Loader(before=press), AHEAD
        ):
            is_pressed.wait(HANG)
    gc.collect()  # the traceback of the interruption may hold the iterator in a cycle
    for thread in prefetchers():
        # It was told to end when its iterator went, and nobody waited for it.
        thread.join(HANG)
    assert not prefetchers()


def test_ctrl_c_anywhere_in_next_loses_no_batch_and_deals_none_twice() -> None:
    strategy = central(2)

    def found_when_interrupted_at(number: int) -> tuple[int, list[int]]:
        """How many moments there were, and the batches."""
        moments, found = 0, []
        iterator = iter(strategy.experimental_distribute_dataset(Loader(3), AHEAD))

        def profile(frame: types.FrameType, event: str, argument: Any) -> None:
            # Python runs a signal's handler when it enters a function of its own, and
            # when it returns from one of C. After `popleft` the batch is the
            # consumer's.
            nonlocal moments
            if not frame.f_code.co_filename.startswith(INPUT) or event not in (
                "call",
                "c_return",
            ):
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
        # From Python 3.12 on: this process has other threads.
        warnings.simplefilter("ignore", DeprecationWarning)
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


@for_changes
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
        with pytest.raises(
            RuntimeError,
            match=r"^This iterator was made in another process, .* Iterate over ",
        ):
            next(iterators[0])

    def close() -> None:
        iterators[0].close()
        assert list(iterators[0]) == []

    def begin_anew() -> None:
        assert [rows_of(step) for step in dataset] == [
            [2 * k, 2 * k + 1] for k in range(6)
        ]

    assert [in_child(act) for act in (drop, ask, close, begin_anew)] == [0, 0, 0, 0]
    found += [rows_of(step) for step in iterators[0]]
    assert found == [[2 * k, 2 * k + 1] for k in range(6)]


@for_releases
@pytest.mark.slow
@without_simulated_devices
@pytest.mark.parametrize("context", [pytest.param("fork", marks=needs_fork), "spawn"])
def test_loader_workers_may_be_forked_and_spawned(context: str) -> None:
    strategy = central(2)
    loader = DataLoader(
        range(8), batch_size=2, num_workers=1, multiprocessing_context=context
    )
    steps = [rows_of(step) for step in strategy.experimental_distribute_dataset(loader)]
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]


EXIT = """
    import torch, torchstrategy
    from torch.utils.data import DataLoader
    from torchstrategy._data import reading

    reading._PATIENCE_S = 1000.0  # who has to wait waits for too long
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
"""  # noqa: E501


@for_changes
@pytest.mark.slow
@without_simulated_devices
def test_the_interpreter_exits_without_a_word_and_without_waiting() -> None:
    done = python("-W", "error", "-c", textwrap.dedent(EXIT), PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
