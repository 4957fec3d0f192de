"""Replicas that do not meet are told so, and steps that will not stop are stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

import torchstrategy
from failures import Problem, assert_same, merge, reduce, replica
from torchstrategy._turns.switch import IN_TURNS

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure")


# Replicas that do not meet


def update(problem: Problem) -> None:
    problem.optimizer.step()


Meeting = Callable[[Problem], None]

UNEQUAL: dict[str, Callable[[int, int], list[Meeting]]] = {
    "only the first calls": lambda me, last: [reduce] if me == 0 else [],
    "only the last calls": lambda me, last: [reduce] if me == last else [],
    "the first calls twice": lambda me, last: [reduce, reduce] if me == 0 else [reduce],
    "the last calls twice": lambda me, last: [merge, merge] if me == last else [merge],
    "different meetings": lambda me, last: [reduce] if me == 0 else [merge],
    "in another order": lambda me, last: (
        [reduce, merge] if me == last else [merge, reduce]
    ),
    "only the first updates": lambda me, last: [update] if me == 0 else [],
    "one updates and others reduce": lambda me, last: (
        [update] if me == last else [reduce]
    ),
}


@pytest.mark.parametrize("meetings", UNEQUAL.values(), ids=UNEQUAL)
def test_replicas_that_meet_unequally_are_told_so(
    three: torchstrategy.Strategy, meetings: Callable[[int, int], list[Meeting]]
) -> None:
    problem = Problem(three)
    before = problem.state()
    left = []

    def step(inputs: torch.Tensor) -> None:
        try:
            problem.model(inputs).square().mean().backward()
            for meeting in meetings(replica(), three.num_replicas_in_sync - 1):
                meeting(problem)
        finally:
            left.append(replica())

    with pytest.raises(RuntimeError, match="different number of"):
        problem.run(step)
    assert sorted(left) == list(range(three.num_replicas_in_sync))
    assert_same(problem.state(), before)
    problem.train()


def test_a_gradient_that_one_replica_reads_is_a_meeting_that_the_others_miss(
    several: torchstrategy.Strategy,
) -> None:
    problem = Problem(several)
    before = problem.state()

    def step(inputs: torch.Tensor) -> None:
        problem.model(inputs).square().mean().backward()
        if replica() == 0:
            nn.utils.clip_grad_norm_(problem.model.parameters(), 1.0)

    told = r"disagree about .*first\.weight" if IN_TURNS else "different number of"
    with pytest.raises(RuntimeError, match=told):
        problem.run(step)
    assert_same(problem.state(), before)


def test_the_backward_of_a_collective_is_a_meeting_that_replicas_can_miss(
    several: torchstrategy.Strategy,
) -> None:
    problem = Problem(several)
    before = problem.state()

    def step(inputs: torch.Tensor) -> None:
        total = torchstrategy.get_replica_context().all_reduce(
            "sum", problem.model(inputs)
        )
        if replica() == 0:
            total.square().mean().backward()

    with pytest.raises(RuntimeError, match="different number of"):
        problem.run(step)
    assert_same(problem.state(), before)
    problem.train()


# Steps that will not stop


def test_a_replica_that_swallows_everything_and_ends_does_not_hide_the_error(
    several: torchstrategy.Strategy,
) -> None:
    problem, error = Problem(several), ValueError("bad")
    before = problem.state()
    last = several.num_replicas_in_sync - 1

    def step(inputs: torch.Tensor) -> str:
        problem.model(inputs).square().mean().backward()
        if replica() == last:
            raise error
        try:
            reduce()
        except BaseException:
            return "as if nothing had happened"
        return "met"

    with pytest.raises(ValueError, match="bad") as caught:
        problem.run(step)
    assert caught.value is error
    assert_same(problem.state(), before)
    problem.train()


def test_a_replica_that_swallows_everything_and_meets_again_is_stopped_again(
    several: torchstrategy.Strategy,
) -> None:
    last = several.num_replicas_in_sync - 1
    stopped: list[int] = []  # what was appended stays when a run fails

    def step() -> None:
        if replica() == last:
            raise ValueError("bad")
        for _ in range(5):
            try:
                reduce()
            except BaseException:
                stopped.append(replica())

    with pytest.raises(ValueError, match="bad"):
        several.run(step)
    assert Counter(stopped) == dict.fromkeys(range(last), 5)
    assert several.reduce(
        "sum", several.run(lambda: torch.ones(()) * 2), axis=None
    ) == 2 * (last + 1)


def test_a_replica_that_alone_meets_and_swallows_everything_is_told_all_the_same(
    several: torchstrategy.Strategy,
) -> None:
    def step() -> None:
        if replica() == 0:
            with suppress(BaseException):
                reduce()

    with pytest.raises(RuntimeError, match="different number of"):
        several.run(step)
    several.run(reduce)


def test_a_meeting_in_a_finally_block_is_held_when_all_come_to_it(
    several: torchstrategy.Strategy,
) -> None:
    error, met = ValueError("bad"), []

    def step() -> None:
        try:
            if replica() == 0:
                raise error
        finally:
            reduce()
            met.append(replica())

    with pytest.raises(ValueError, match="bad") as caught:
        several.run(step)
    assert caught.value is error
    assert 0 in met
    several.run(reduce)


@pytest.mark.parametrize("who", ["first", "last"])
def test_the_stopped_do_not_wait_in_a_finally_block(
    several: torchstrategy.Strategy, who: str
) -> None:
    """A step synchronizes in such a block."""
    fails = 0 if who == "first" else several.num_replicas_in_sync - 1
    error, reached = ValueError("bad"), []

    def step() -> None:
        reduce()
        if replica() == fails:
            raise error
        try:
            merge()
        finally:
            reached.append(replica())
            reduce()
            reached.append("not stopped")

    with pytest.raises(ValueError, match="bad") as caught:
        several.run(step)
    assert caught.value is error
    assert "not stopped" not in reached
    several.run(reduce)


def test_a_run_inside_a_merge_function_may_fail_alone(
    several: torchstrategy.Strategy,
) -> None:
    problem = Problem(several)
    before = problem.state()
    caught = []

    def inner() -> None:
        reduce()
        if replica() == 0:
            raise ValueError("inner")
        reduce()

    def merged(strategy: torchstrategy.Strategy) -> None:
        with pytest.raises(ValueError, match="inner"):
            strategy.run(inner)
        caught.append(True)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        torchstrategy.get_replica_context().merge_call(merged)
        reduce()
        return inputs.sum()

    results = several.experimental_local_results(problem.run(step))
    assert len(results) == several.num_replicas_in_sync
    assert caught == [True]
    assert_same(problem.state(), before)
