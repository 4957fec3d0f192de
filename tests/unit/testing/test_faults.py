"""Failures that a test injects happen where it says.

They leave behind what `Strategy.run` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from failures import Problem, assert_same
from problems import context, deal, replica_id
from topologies import SEVERAL, TOPOLOGIES, central
from torchstrategy._group import replica_threads
from torchstrategy.testing._faults import fail_in_replica, slow_replica
from torchstrategy.testing._lockstep import Lockstep

ONE_REPLICA = [name for name in TOPOLOGIES if name not in SEVERAL]


class Injected(Exception):
    """What no code but a test raises."""


class Training(Problem):
    """A model and its optimizer in the middle of training, on a dealt-out batch.

    Its gradients wait for more.
    """

    def new_inputs(self) -> Any:
        return deal(self.strategy, torch.randn(12, 3))


Make = Callable[[int], torchstrategy.Strategy]


@pytest.fixture
def problem(make: Make) -> Training:
    """Training that is under way in three replicas."""
    return Training(make(3))


def train(problem: Training) -> Callable[[torch.Tensor], None]:
    """A step that comes to everything."""

    def step(inputs: torch.Tensor) -> None:
        here = context()
        here.all_reduce("sum", torch.ones(()))
        problem.optimizer.zero_grad()
        loss = torch.relu(problem.model(inputs)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(problem.model.parameters(), 0.01)
        here.merge_call(lambda strategy: None)
        problem.optimizer.step()
        torch.sigmoid(loss)

    return step


def trained(problem: Training) -> dict[str, Any]:
    """The parameters, their gradients, and what the optimizer keeps of them."""
    return {
        key: value
        for key, value in problem.state().items()
        if any(
            key in (name, f"{name}.grad", f"{name}.momentum_buffer")
            for name, _ in problem.model.named_parameters()
        )
    }


BEFORE_THE_UPDATE = [
    "start",
    "all_reduce",
    "all_reduce(SUM)",
    "linear",
    "batch_norm",
    "dropout",
    "relu",
    "square",
    "backward",
    "the first read of a gradient",
    "the first read of a gradient (.grad) after backward",
    "merge_call",
    "optimizer.step",
    "optimizer.step()",
]
AFTER_THE_UPDATE = ["sigmoid", "end"]


# What a failure leaves behind


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("at", BEFORE_THE_UPDATE)
def test_a_failure_before_the_update_leaves_everything_as_it_was(
    problem: Training, at: str, who: int
) -> None:
    before, random = problem.state(), torch.get_rng_state()
    with fail_in_replica(who, at, Injected), pytest.raises(Injected) as caught:
        problem.run(train(problem))
    assert f"raised by replica {who} of 3" in caught.value.__notes__[0]
    assert_same(problem.state(), before)
    if who == 0 and at in ("start", "all_reduce"):
        assert torch.equal(torch.get_rng_state(), random)
    problem.run(train(problem))


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("at", AFTER_THE_UPDATE)
def test_a_failure_after_the_update_keeps_the_update(
    make: Make, problem: Training, at: str, who: int
) -> None:
    twin = Training(make(3))
    torch.manual_seed(5)
    twin.run(train(twin))
    torch.manual_seed(5)
    with fail_in_replica(who, at, Injected), pytest.raises(Injected):
        problem.run(train(problem))
    assert_same(trained(problem), trained(twin))


@pytest.mark.parametrize("at", ["linear", "backward", "optimizer.step()"])
def test_a_failure_in_the_second_step_of_a_run_keeps_the_first(
    make: Make, problem: Training, at: str
) -> None:
    def steps(problem: Training, count: int) -> Callable[[torch.Tensor], None]:
        def step(inputs: torch.Tensor) -> None:
            for _ in range(count):
                problem.optimizer.zero_grad()
                problem.model(inputs).square().mean().backward()
                problem.optimizer.step()

        return step

    twin = Training(make(3))
    torch.manual_seed(5)
    twin.run(steps(twin, 1))
    torch.manual_seed(5)
    linears = 2 if at == "linear" else 1
    with fail_in_replica(1, at, Injected, skip=linears), pytest.raises(Injected):
        problem.run(steps(problem, 2))
    assert_same(trained(problem), trained(twin))


# Where and how often


def test_the_default_error_says_where_it_comes_from() -> None:
    with (
        fail_in_replica(1),
        pytest.raises(RuntimeError, match=r"injected: .*replica 1 has come to 'start'"),
    ):
        central(2).run(lambda: None)


def test_the_very_object_is_raised() -> None:
    error = Injected("this one")
    with fail_in_replica(1, error=error), pytest.raises(Injected) as caught:
        central(2).run(lambda: None)
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_any_exception_can_be_injected(error: type[BaseException]) -> None:
    strategy = central(3)
    with fail_in_replica(1, "all_reduce", error), pytest.raises(error):
        strategy.run(lambda: context().all_reduce("sum", 1))
    assert strategy.experimental_local_results(strategy.run(replica_id)) == (0, 1, 2)


@pytest.mark.parametrize("name", ONE_REPLICA)
@pytest.mark.parametrize("at", ["start", "all_reduce", "relu", "end"])
def test_a_lone_replica_fails_too(name: str, at: str) -> None:
    def step() -> None:
        context().all_reduce("sum", torch.relu(torch.ones(1)))

    with fail_in_replica(0, at, Injected), pytest.raises(Injected):
        TOPOLOGIES[name]().run(step)


@pytest.mark.parametrize("at", ["all_reduce", "relu"])
def test_the_other_replicas_do_not_fail(at: str) -> None:
    seen = []

    def step() -> None:
        try:
            context().all_reduce("sum", torch.relu(torch.ones(1)))
        except Injected:
            seen.append(replica_id())
            raise

    with fail_in_replica(2, at, Injected), pytest.raises(Injected):
        central(4).run(step)
    assert seen == [2]


def test_replicas_that_run_at_once_fail_where_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_threads, "memory_device", lambda device: device)
    strategy, together = (
        torchstrategy.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        threading.Barrier(2),
    )

    def step() -> None:
        for _ in range(50):
            torch.relu(torch.ones(1))
        together.wait(5.0)
        context().all_reduce("sum", 1)

    with fail_in_replica(1, "all_reduce", Injected), pytest.raises(Injected):
        strategy.run(step)
    with fail_in_replica(1, "relu", Injected, skip=49), pytest.raises(Injected):
        strategy.run(lambda: [torch.relu(torch.ones(1)) for _ in range(50)])


def test_a_point_of_a_lockstep_fails() -> None:
    strategy = central(2)
    with Lockstep([1, 0]) as lockstep:

        def step() -> None:
            lockstep.point("half-way")
            lockstep.point("half-way 2")

        with fail_in_replica(0, "half-way 2", Injected), pytest.raises(Injected):
            strategy.run(step)
    assert lockstep.history[-1] == (0, "half-way 2")


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 1))
def test_it_fails_as_often_as_it_should_after_it_got_away_as_often_as_it_should(
    skip: int, times: int, replica: int
) -> None:
    outcomes = []

    def step() -> None:
        for _ in range(10):
            try:
                torch.relu(torch.ones(1))
                outcomes.append((replica_id(), True))
            except Injected:
                outcomes.append((replica_id(), False))

    with fail_in_replica(replica, "relu", Injected, times=times, skip=skip):
        TWO.run(step)
    well = [ok for r, ok in outcomes if r == replica]
    assert well == [True] * skip + [False] * times + [True] * (10 - skip - times)
    assert [ok for r, ok in outcomes if r != replica] == [True] * 10


TWO = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])


def test_a_program_that_tries_again_survives() -> None:
    strategy, tries = central(2), 0
    with fail_in_replica(1, "start", Injected, times=2):
        while True:
            tries += 1
            try:
                results = strategy.run(replica_id)
            except Injected:
                continue
            break
    assert tries == 3
    assert strategy.experimental_local_results(results) == (0, 1)


def test_failures_of_two_replicas_may_be_injected_at_once() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    with (
        fail_in_replica(2, error=KeyError),
        fail_in_replica(1, "end", ValueError("invalid")),
    ):
        with pytest.raises(ValueError, match="invalid"):
            strategy.run(lambda: None)
        with pytest.raises(KeyError):
            strategy.run(lambda: None)
        strategy.run(lambda: None)


def test_a_slow_replica_may_fail() -> None:
    seen = []
    with slow_replica(0), fail_in_replica(0, error=Injected), pytest.raises(Injected):
        central(3).run(lambda: seen.append(replica_id()))
    assert seen == [1, 2]


def test_what_is_done_outside_of_replicas_does_not_fail() -> None:
    strategy = central(2)

    def merge(strategy: torchstrategy.Strategy) -> None:
        torch.relu(torch.ones(1))

    with fail_in_replica(0, "relu", Injected):
        torch.relu(torch.ones(1))
        with strategy.scope():
            torch.relu(torch.ones(1))
        strategy.run(lambda: context().merge_call(merge))
        with pytest.raises(Injected):
            strategy.run(lambda: torch.relu(torch.ones(1)))


def test_after_the_block_nothing_fails() -> None:
    strategy = central(2)
    with pytest.raises(RuntimeError, match="injected"), fail_in_replica(0, times=2):
        strategy.run(lambda: None)
    strategy.run(lambda: None)


# A failure that does not happen


def test_a_failure_that_does_not_happen_fails_the_test_and_says_what_did() -> None:
    def step() -> None:
        torch.relu(torch.ones(1))
        torch.relu(torch.ones(1))
        context().merge_call(lambda strategy: None)

    with (
        pytest.raises(AssertionError, match="failed 0 times instead of 1") as caught,
        fail_in_replica(1, at="bakward"),
    ):
        central(2).run(step)
    assert "at='bakward'" in str(caught.value)
    assert (
        "Replica 1 came to: start, ones (2 times), relu (2 times), merge_call, end."
        in str(caught.value)
    )


def test_a_failure_of_a_replica_that_sits_out_does_not_happen() -> None:
    strategy = central(3)
    with (
        pytest.raises(AssertionError, match="Replica 2 came to: nothing"),
        fail_in_replica(2),
    ):
        strategy.run(lambda batch: None, args=(deal(strategy, torch.ones(2)),))


def test_a_failure_that_happens_too_seldom_fails_the_test() -> None:
    strategy = central(2)
    with (
        pytest.raises(AssertionError, match="failed 1 time instead of 2"),
        fail_in_replica(0, times=2, error=Injected),
        pytest.raises(Injected),
    ):
        strategy.run(lambda: None)


@pytest.mark.parametrize(
    "at", ["step", "all", "all_reduce(", "relu_", "optimizer", "s", "half-way 2"]
)
def test_a_name_is_meant_whole(at: str) -> None:
    def step(lockstep: Lockstep) -> None:
        context().all_reduce("sum", torch.relu(torch.ones(1)))
        lockstep.point("half-way 22")

    with (
        Lockstep([0]) as lockstep,
        pytest.raises(AssertionError, match="the replica has failed 0 times"),
        fail_in_replica(1, at),
    ):
        central(2).run(lambda: step(lockstep))


def test_another_exception_that_leaves_the_block_wins() -> None:
    with pytest.raises(KeyError, match="other"), fail_in_replica(1, "bakward"):
        raise KeyError("other")


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"replica": -1}, ValueError, "got -1"),
        ({"replica": True}, TypeError, "got True, a bool"),
        ({"replica": None}, TypeError, "got None, a NoneType"),
        ({"at": ""}, TypeError, "got ''"),
        ({"at": ("backward", 2)}, TypeError, "`at` is the name"),
        ({"error": "bad"}, TypeError, "got 'bad'"),
        ({"error": int}, TypeError, "class of exceptions; got <class 'int'>"),
        ({"error": UnicodeDecodeError}, TypeError, "arguments"),
        ({"times": 0}, ValueError, "`times` is 1 or more; got 0"),
        ({"times": 1.0}, TypeError, "`times` is an int; got 1.0"),
        ({"skip": -1}, ValueError, "`skip` is 0 or more; got -1"),
        ({"skip": True}, TypeError, "`skip` is an int; got True"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with (
        pytest.raises(error, match=message),
        fail_in_replica(**{"replica": 0, **arguments}),
    ):
        pytest.fail("the block was entered")


def test_failures_are_not_injected_from_a_replica() -> None:
    def step() -> None:
        with fail_in_replica(0):
            pass

    with pytest.raises(RuntimeError, match="fail_in_replica was called in replica 0"):
        central(2).run(step)
