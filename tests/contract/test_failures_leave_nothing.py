"""Failures leave nothing that runs, waits or takes memory, and disturb nobody."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import types
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import torchstrategy
from conditions import for_changes, for_releases
from failures import MOMENTS, Problem, Steps, merge, reduce

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure")


# Leaks


class Held:
    """Something that a step holds in its frame."""


def census() -> Counter[type]:
    gc.collect()
    kinds = Counter(type(thing) for thing in gc.get_objects())
    ours = {
        kind: n
        for kind, n in kinds.items()
        if str(kind.__module__).startswith("torchstrategy")
    }
    watched = (
        torch.Tensor,
        nn.Parameter,
        types.FrameType,
        types.TracebackType,
        threading.Thread,
        ValueError,
        Held,
    )
    return Counter(ours | {kind: kinds[kind] for kind in watched})


@for_changes
@pytest.mark.slow
def test_a_hundred_failures_leak_nothing() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    problem = Problem(strategy)
    held = weakref.WeakSet()

    def fail(times: int) -> None:
        for i in range(times):
            steps = Steps(problem, MOMENTS[i % len(MOMENTS)], i % 3, ValueError("bad"))

            def step(inputs: torch.Tensor, steps: Steps = steps) -> None:
                here = Held()
                held.add(here)
                steps(inputs)

            with pytest.raises(ValueError, match="bad"):
                problem.run(step)
            steps.forget()

    fail(2 * len(MOMENTS))
    threads, before = set(threading.enumerate()), census()
    fail(100)
    after = census()
    assert not set(threading.enumerate()) - threads
    assert not held
    grown = {
        kind.__name__: (before[kind], n)
        for kind, n in after.items()
        if n > before[kind] + 3
    }
    assert not grown, f"more than before, of (before, now): {grown}"


@for_releases
@pytest.mark.slow
def test_failures_do_not_use_up_memory() -> None:
    problem = Problem(torchstrategy.CentralStorageStrategy(["cpu"] * 2))

    def fail() -> int:
        for i in range(6):
            with pytest.raises(ValueError, match="bad"):
                problem.run(Steps(problem, "after backward", i % 2, ValueError("bad")))
        # A tensor's memory may outlive the first collection of a cycle that it is in.
        for _ in range(2):
            gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        _, *sizes = [fail() for _ in range(6)]
    finally:
        tracemalloc.stop()
    # A table of the process may grow once in a while. What failures keep is there after
    # each six of them.
    assert min(after - before for before, after in pairwise(sizes)) < 6 * 600, (
        "each failure keeps what it allocated"
    )


def test_an_error_that_the_user_keeps_does_not_keep_later_runs() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)

    def fails() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as caught:
        strategy.run(fails)
    later = Held()
    alive = weakref.ref(later)
    strategy.run(lambda held: None, args=(later,))
    del later
    gc.collect()
    assert alive() is None
    assert caught.value.args == ("bad",)


def test_threads_are_made_once_and_end_when_the_strategy_is_collected(
    no_thread_left: None,
) -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    before = set(threading.enumerate())
    strategy.run(reduce)
    made = set(threading.enumerate()) - before
    assert len(made) == 3
    strategy.run(merge)
    assert set(threading.enumerate()) - before == made


@for_changes
def test_threads_end_when_a_strategy_whose_replicas_failed_is_collected(
    no_thread_left: None,
) -> None:
    problem = Problem(torchstrategy.CentralStorageStrategy(["cpu"] * 3))
    for moment in MOMENTS:
        for who in range(3):
            steps = Steps(problem, moment, who, ValueError("bad"))
            with pytest.raises(ValueError, match="bad"):
                problem.run(steps)
            steps.forget()


def test_what_a_run_was_given_is_let_go_when_it_is_over(
    several: torchstrategy.Strategy,
) -> None:
    given = Held()
    alive = weakref.ref(given)
    several.run(lambda held: reduce(), args=(given,))
    del given
    gc.collect()
    assert alive() is None


# What others do meanwhile


HOOKS = pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)


@HOOKS
def test_a_strategy_may_be_collected_while_an_optimizer_steps(
    register: Callable[..., Any],
) -> None:
    # The collector runs when it likes, so also while torch goes through the hooks that
    # it has for all optimizers.
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    strategies: list[torchstrategy.Strategy] = []

    def collects(*_: object) -> None:
        strategies.clear()
        gc.collect()

    hook = register(collects)
    strategies.append(torchstrategy.CentralStorageStrategy(["cpu"] * 2))
    strategies[0].run(reduce)
    another_hook = register(lambda *_: None)
    try:
        optimizer.step()
    finally:
        hook.remove()
        another_hook.remove()
    assert parameter.item() == 0.5


@HOOKS
def test_another_threads_strategy_does_not_disturb_an_optimizer_that_steps(
    register: Callable[..., Any],
) -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def in_another_thread() -> None:
        torchstrategy.CentralStorageStrategy(["cpu"] * 2).run(reduce)

    def meanwhile(*_: object) -> None:
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join(10)

    hook, another_hook = register(meanwhile), register(lambda *_: None)
    try:
        optimizer.step()
    finally:
        hook.remove()
        another_hook.remove()
    assert parameter.item() == 0.5
