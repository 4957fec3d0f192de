"""What a failing replica leaves behind: the error itself, the state as it was, and nothing that runs or waits."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import tracemalloc
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torchstrategy
from problems import close, in_pieces, share_a_place
from topologies import central, central_in_one_place, central_with_copies
from torchstrategy._execution import replica_threads

HANG = 15.0  # seconds: a run of these tests takes milliseconds

needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
# Simulated devices count their memory in finalizers, where what interrupts a replica is lost: it comes once more.
interrupts_finalizers = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning"
)


class Hang(BaseException):
    """A run that would never have returned."""


@pytest.fixture(autouse=True)
def a_hang_is_a_failure() -> Iterator[None]:
    """Ends a run that hangs, again and again if it has to, so that it does not hang the suite."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(os.path.dirname(torchstrategy.__file__)):
                raise Hang
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=[central, central_with_copies], ids=["shared", "copied"])
def three(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """Three replicas that share the memory of the parameters, and three with copies of their own."""
    return request.param(3)


class TwoArguments(Exception):
    """Cannot be made again from its text."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)


class RaisesInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ctx.error


def nothing(moment: str) -> None:
    pass


class Net(nn.Module):
    """Parameters, running statistics, an integer buffer, random numbers, and an attribute that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.25)
        self.last = nn.Linear(5, 2)
        self.calls = 0

    def forward(self, inputs: torch.Tensor, at: Callable[[str], None] = nothing) -> torch.Tensor:
        self.calls += 1
        hidden = self.dropout(self.norm(self.first(inputs)))
        at("in forward")
        return self.last(hidden)


def replica() -> int:
    return torchstrategy.get_replica_context().replica_id_in_sync_group


class Problem:
    """A model and its optimizer in the middle of training, with gradients that wait for more."""

    def __init__(self, strategy: torchstrategy.Strategy) -> None:
        torch.manual_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model = Net()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.inputs = self.new_inputs()
        self.train()
        self.accumulate()

    def new_inputs(self) -> Any:
        return self.strategy.run(lambda: torch.randn(4, 3))

    def train(self) -> None:
        def step(inputs: torch.Tensor) -> None:
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()

        self.run(step)

    def accumulate(self) -> None:
        self.run(lambda inputs: self.model(inputs).square().mean().backward())

    def run(self, step: Callable[[torch.Tensor], Any]) -> Any:
        return self.strategy.run(step, args=(self.inputs,))

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, the gradients, and what a forward may write."""
        state: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter.detach().clone()
            state[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
        for name, buffer in self.model.named_buffers():
            state[name] = buffer.clone()
        for i, group in enumerate(self.optimizer.param_groups):
            state[f"group {i}"] = {key: value for key, value in group.items() if key != "params"}
        for name, module in self.model.named_modules():
            plain = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float))}
            state[f"attributes of {name}"] = plain
            state[f"class of {name}"] = type(module)
        state["class of the optimizer"] = type(self.optimizer)
        return state


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(state[name], torch.Tensor), f"{name} is {state[name]!r}"
            assert torch.equal(state[name], value), f"{name} is {state[name]} and was {value}"
        else:
            assert state[name] == value, name


class Steps:
    """A step that fails in one replica at one moment, and a record of who is in it."""

    def __init__(self, problem: Problem, moment: str, who: int, error: BaseException, clears: bool = True) -> None:
        self.problem, self.moment, self.who, self.error, self.clears = problem, moment, who, error, clears
        self.entered: list[int] = []
        self.left: list[int] = []

    def __call__(self, inputs: torch.Tensor) -> None:
        self.entered.append(replica())
        try:
            self.step(inputs)
        finally:
            self.left.append(replica())

    def at(self, moment: str) -> None:
        if moment == self.moment and replica() == self.who:
            raise self.error

    def step(self, inputs: torch.Tensor) -> None:
        model, optimizer = self.problem.model, self.problem.optimizer
        context = torchstrategy.get_replica_context()
        self.at("at the beginning")
        optimizer.param_groups[0]["lr"] = 0.5
        model.norm.momentum = 0.75
        context.all_reduce("sum", torch.ones(()))
        self.at("after a meeting")
        if self.clears:
            optimizer.zero_grad()
            self.at("after clearing")
        outputs = model(inputs, self.at)
        if self.moment == "in backward" and replica() == self.who:
            outputs = RaisesInBackward.apply(outputs, self.error)
        outputs.square().mean().backward()
        self.at("after backward")
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        self.at("after clipping")
        context.merge_call(lambda strategy: None)
        self.at("after a merge call")
        context.merge_call(self.merge)

    def forget(self) -> None:
        """Takes apart error -> traceback -> outputs -> their graph -> error, which no collector can see through."""
        self.error.__traceback__ = None

    def merge(self, strategy: torchstrategy.Strategy) -> None:
        if self.moment == "in a merge function":
            raise self.error


MOMENTS = [
    "at the beginning",
    "after a meeting",
    "after clearing",
    "in forward",
    "in backward",
    "after backward",
    "after clipping",
    "after a merge call",
    "in a merge function",
]
ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad"),
    "KeyError": lambda: KeyError("key"),
    "two_arguments": lambda: TwoArguments(1, "two"),
    "StopIteration": lambda: StopIteration("stop"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
}


# What comes out of `run`


@pytest.mark.parametrize("make_error", ERRORS.values(), ids=ERRORS)
def test_what_a_replica_raises_comes_out_as_the_same_object(
    strategy: torchstrategy.Strategy, make_error: Callable[[], BaseException]
) -> None:
    problem = Problem(strategy)
    for moment in ("in forward", "in backward", "in a merge function"):
        error = make_error()
        arguments = error.args
        steps = Steps(problem, moment, strategy.num_replicas_in_sync - 1, error)
        with pytest.raises(type(error)) as caught:
            problem.run(steps)
        assert caught.value is error
        assert error.args == arguments
        assert sorted(steps.entered) == sorted(steps.left)


@pytest.mark.parametrize("moment", ["at the beginning", "in backward", "after a merge call"])
def test_a_note_names_the_replica_and_its_device(several: torchstrategy.Strategy, moment: str) -> None:
    count, error = several.num_replicas_in_sync, ValueError("bad")
    steps = Steps(Problem(several), moment, count - 1, error)
    with pytest.raises(ValueError, match="bad"):
        steps.problem.run(steps)
    (note,) = error.__notes__
    assert f"replica {count - 1} of {count}" in note
    assert str(several.extended.worker_devices[count - 1]) in note


def test_an_error_that_is_raised_at_every_step_collects_one_note(several: torchstrategy.Strategy) -> None:
    error = ValueError("bad")
    steps = Steps(Problem(several), "in forward", 0, error)
    for _ in range(3):
        with pytest.raises(ValueError, match="bad"):
            steps.problem.run(steps)
    assert len(error.__notes__) == 1


def test_an_error_that_refuses_attributes_comes_out_all_the_same(several: torchstrategy.Strategy) -> None:
    class Sealed(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "__notes__":
                raise AttributeError(name)
            super().__setattr__(name, value)

    error = Sealed()

    def step() -> None:
        raise error

    with pytest.raises(Sealed) as caught:
        several.run(step)
    assert caught.value is error


def test_an_error_keeps_its_traceback_and_its_cause(several: torchstrategy.Strategy) -> None:
    cause = KeyError("cause")

    def the_line_to_look_at() -> None:
        raise ValueError("bad") from cause

    with pytest.raises(ValueError, match="bad") as caught:
        several.run(the_line_to_look_at)
    assert caught.value.__cause__ is cause
    assert caught.traceback[-1].name == "the_line_to_look_at"


def test_replicas_whose_turn_has_not_come_do_not_begin(in_one_place: torchstrategy.Strategy) -> None:
    steps = Steps(Problem(in_one_place), "at the beginning", 0, ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        steps.problem.run(steps)
    assert steps.entered == [0]


def test_what_a_stopped_replica_raises_does_not_hide_the_error_that_stopped_it(
    several: torchstrategy.Strategy,
) -> None:
    error = ValueError("what went wrong")
    last = several.num_replicas_in_sync - 1

    def step() -> None:
        if replica() == last:
            raise error
        try:
            torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))
        finally:
            raise KeyError("a consequence: cleaning up failed")

    with pytest.raises((ValueError, KeyError)) as caught:
        several.run(step)
    assert caught.value is error


# What is left


@pytest.mark.parametrize("clears", [True, False], ids=["clearing", "accumulating"])
@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_failure_before_an_update_leaves_everything_as_it_was(
    three: torchstrategy.Strategy, moment: str, who: str, clears: bool
) -> None:
    if moment == "after clearing" and not clears:
        pytest.skip("this step does not clear")
    problem = Problem(three)
    before = problem.state()
    assert before["first.weight.grad"] is not None
    assert before["first.weight.momentum_buffer"] is not None
    steps = Steps(problem, moment, 0 if who == "first" else three.num_replicas_in_sync - 1, ValueError("bad"), clears)
    with pytest.raises(ValueError, match="bad"):
        problem.run(steps)
    assert sorted(steps.left) == sorted(steps.entered), "a replica is still in the step"
    assert_same(problem.state(), before)


@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_failure_training_goes_on_as_if_it_had_not_been(three: torchstrategy.Strategy, moment: str) -> None:
    problem = Problem(three)
    for who in range(three.num_replicas_in_sync):
        with pytest.raises(ValueError, match="bad"):
            problem.run(Steps(problem, moment, who, ValueError("bad")))
    torch.manual_seed(1)
    problem.train()
    problem.accumulate()

    spared = Problem(copy.deepcopy(three))
    torch.manual_seed(1)
    spared.train()
    spared.accumulate()
    assert_same(problem.state(), spared.state())


def test_gradients_that_were_none_are_none_after_a_failure(several: torchstrategy.Strategy) -> None:
    problem = Problem(several)
    problem.optimizer.zero_grad()
    with pytest.raises(ValueError, match="bad"):
        problem.run(Steps(problem, "after clipping", 0, ValueError("bad")))
    assert all(parameter.grad is None for parameter in problem.model.parameters())


@pytest.mark.parametrize("way", ["grad_to_none", "grad_zero_", "set_to_none_false", "module_zero_grad", "grad_scaled"])
def test_however_gradients_were_cleared_a_failure_brings_them_back(three: torchstrategy.Strategy, way: str) -> None:
    problem = Problem(three)
    before = problem.state()

    def step(inputs: torch.Tensor) -> None:
        for parameter in problem.model.parameters():
            if way == "grad_to_none":
                parameter.grad = None
            elif way == "grad_zero_":
                parameter.grad.zero_()
            elif way == "grad_scaled":
                parameter.grad *= 0.5
        if way == "set_to_none_false":
            problem.optimizer.zero_grad(set_to_none=False)
        if way == "module_zero_grad":
            problem.model.zero_grad()
        problem.model(inputs).square().mean().backward()
        torchstrategy.get_replica_context().merge_call(lambda strategy: None)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        problem.run(step)
    assert_same(problem.state(), before)


def test_an_update_that_was_completed_stays(several: torchstrategy.Strategy) -> None:
    problem = Problem(several)
    spared = Problem(copy.deepcopy(several))
    for who in range(several.num_replicas_in_sync):

        def step(inputs: torch.Tensor, who: int = who) -> None:
            problem.optimizer.zero_grad()
            problem.model(inputs).square().mean().backward()
            problem.optimizer.step()
            if replica() == who:
                raise ValueError("bad")

        torch.manual_seed(who)
        with pytest.raises(ValueError, match="bad"):
            problem.run(step)
        torch.manual_seed(who)
        spared.train()
        state, expected = problem.state(), spared.state()
        for name in (name for name, _ in problem.model.named_parameters()):
            assert torch.equal(state[name], expected[name])
            assert torch.equal(state[f"{name}.momentum_buffer"], expected[f"{name}.momentum_buffer"])
            assert torch.equal(state[f"{name}.grad"], expected[f"{name}.grad"])


class Halfway(torch.optim.Optimizer):
    """Fails after the first of its parameters."""

    def __init__(self, parameters: Any, replaces_gradients: bool = False) -> None:
        super().__init__(parameters, {})
        self.replaces_gradients = replaces_gradients
        self.error: BaseException | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                if i == 1 and self.error is not None:
                    raise self.error
                if self.replaces_gradients:
                    parameter.grad = parameter.grad * 2
                else:
                    parameter.grad.mul_(2)
                parameter.add_(parameter.grad, alpha=-0.5)
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


@pytest.mark.parametrize("replaces_gradients", [False, True], ids=["writes gradients", "replaces gradients"])
def test_an_update_that_fails_halfway_leaves_what_plain_torch_leaves(
    several: torchstrategy.Strategy, replaces_gradients: bool
) -> None:
    inputs = torch.randn(12, 3)

    def trained(strategy: torchstrategy.Strategy) -> dict[str, Any]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            optimizer = Halfway(model.parameters(), replaces_gradients)
        pieces = in_pieces(strategy, inputs)

        def step(piece: torch.Tensor) -> None:
            model(piece).square().mean().backward()
            optimizer.step()

        strategy.run(step, args=(pieces,))
        optimizer.error = ValueError("bad")
        with pytest.raises(ValueError, match="bad") as caught:
            strategy.run(step, args=(pieces,))
        assert caught.value is optimizer.error
        left: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            left[name], left[f"{name}.grad"] = parameter.detach(), parameter.grad
            left[f"{name}.steps"] = torch.tensor(optimizer.state[parameter]["steps"])
        return left

    close(trained(several), trained(torchstrategy.get_strategy()))


@pytest.mark.parametrize(
    "different",
    [
        lambda: [1] if replica() else (1,),
        lambda: {"a" if replica() else "b": 1},
        lambda: (torch.ones(1),) * (1 + replica()),
    ],
    ids=["types", "keys", "lengths"],
)
def test_results_that_cannot_be_put_together_leave_everything_as_it_was(
    several: torchstrategy.Strategy, different: Callable[[], Any]
) -> None:
    problem = Problem(several)
    before = problem.state()

    def step(inputs: torch.Tensor) -> Any:
        problem.optimizer.zero_grad()
        problem.model(inputs).square().mean().backward()
        return different()

    with pytest.raises(ValueError, match="structure"):
        problem.run(step)
    assert_same(problem.state(), before)
    problem.train()


def test_a_buffer_that_cannot_be_brought_back_leaves_everything_as_it_was(several: torchstrategy.Strategy) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("history", torch.zeros(1))
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.history = torch.cat([self.history, torch.ones(1)])
            return self.norm(inputs)

    with several.scope():
        model = Grows()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="history"):
        several.run(lambda: model(torch.randn(4, 3)).sum().backward())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())


# Replicas that do not meet


def reduce(problem: Problem | None = None) -> None:
    torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))


def merge(problem: Problem | None = None) -> None:
    torchstrategy.get_replica_context().merge_call(lambda strategy: None)


def update(problem: Problem) -> None:
    problem.optimizer.step()


Meeting = Callable[[Problem], None]

UNEQUAL: dict[str, Callable[[int, int], list[Meeting]]] = {
    "only the first calls": lambda me, last: [reduce] if me == 0 else [],
    "only the last calls": lambda me, last: [reduce] if me == last else [],
    "the first calls twice": lambda me, last: [reduce, reduce] if me == 0 else [reduce],
    "the last calls twice": lambda me, last: [merge, merge] if me == last else [merge],
    "different meetings": lambda me, last: [reduce] if me == 0 else [merge],
    "in another order": lambda me, last: [reduce, merge] if me == last else [merge, reduce],
    "only the first updates": lambda me, last: [update] if me == 0 else [],
    "one updates and others reduce": lambda me, last: [update] if me == last else [reduce],
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


def test_a_gradient_that_one_replica_reads_is_a_meeting_that_the_others_miss(several: torchstrategy.Strategy) -> None:
    problem = Problem(several)
    before = problem.state()

    def step(inputs: torch.Tensor) -> None:
        problem.model(inputs).square().mean().backward()
        if replica() == 0:
            nn.utils.clip_grad_norm_(problem.model.parameters(), 1.0)

    with pytest.raises(RuntimeError, match="different number of"):
        problem.run(step)
    assert_same(problem.state(), before)


def test_the_backward_of_a_collective_is_a_meeting_that_replicas_can_miss(several: torchstrategy.Strategy) -> None:
    problem = Problem(several)
    before = problem.state()

    def step(inputs: torch.Tensor) -> None:
        total = torchstrategy.get_replica_context().all_reduce("sum", problem.model(inputs))
        if replica() == 0:
            total.square().mean().backward()

    with pytest.raises(RuntimeError, match="different number of"):
        problem.run(step)
    assert_same(problem.state(), before)
    problem.train()


# Steps that will not stop


def test_a_replica_that_swallows_everything_and_ends_does_not_hide_the_error(several: torchstrategy.Strategy) -> None:
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


def test_a_replica_that_swallows_everything_and_meets_again_is_stopped_again(several: torchstrategy.Strategy) -> None:
    last, stopped = several.num_replicas_in_sync - 1, Counter()

    def step() -> None:
        if replica() == last:
            raise ValueError("bad")
        for _ in range(5):
            try:
                reduce()
            except BaseException:
                stopped[replica()] += 1

    with pytest.raises(ValueError, match="bad"):
        several.run(step)
    assert stopped == dict.fromkeys(range(last), 5)
    assert several.reduce("sum", several.run(lambda: torch.ones(()) * 2), axis=None) == 2 * (last + 1)


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


def test_a_meeting_in_a_finally_block_is_held_when_all_come_to_it(several: torchstrategy.Strategy) -> None:
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
def test_a_meeting_in_a_finally_block_is_not_waited_for_by_those_who_are_stopped(
    several: torchstrategy.Strategy, who: str
) -> None:
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


def test_a_run_inside_a_merge_function_may_fail_alone(several: torchstrategy.Strategy) -> None:
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


# Leaks


class Held:
    """Something that a step holds in its frame."""


def census() -> Counter[type]:
    gc.collect()
    kinds = Counter(type(thing) for thing in gc.get_objects())
    ours = {kind: n for kind, n in kinds.items() if str(kind.__module__).startswith("torchstrategy")}
    watched = (torch.Tensor, nn.Parameter, types.FrameType, types.TracebackType, threading.Thread, ValueError, Held)
    return Counter(ours | {kind: kinds[kind] for kind in watched})


@pytest.mark.slow
def test_two_hundred_failures_leak_nothing() -> None:
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
    fail(200)
    after = census()
    assert not set(threading.enumerate()) - threads
    assert not held
    grown = {kind.__name__: (before[kind], n) for kind, n in after.items() if n > before[kind] + 3}
    assert not grown, f"more than before, of (before, now): {grown}"


@pytest.mark.slow
def test_failures_do_not_use_up_memory() -> None:
    problem = Problem(torchstrategy.CentralStorageStrategy(["cpu"] * 2))

    def fail() -> int:
        for i in range(6):
            with pytest.raises(ValueError, match="bad"):
                problem.run(Steps(problem, "after backward", i % 2, ValueError("bad")))
        for _ in range(2):  # a tensor's memory may outlive the first collection of a cycle that it is in
            gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        _, first, *later = [fail() for _ in range(5)]
    finally:
        tracemalloc.stop()
    assert min(later) - first < 12 * 600, "each failure keeps some of what it allocated"


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


def test_threads_are_made_once_and_end_when_the_strategy_is_collected(no_thread_left: None) -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    before = set(threading.enumerate())
    strategy.run(reduce)
    made = set(threading.enumerate()) - before
    assert len(made) == 3
    strategy.run(merge)
    assert set(threading.enumerate()) - before == made


def test_threads_end_when_a_strategy_whose_replicas_failed_is_collected(no_thread_left: None) -> None:
    problem = Problem(torchstrategy.CentralStorageStrategy(["cpu"] * 3))
    for moment in MOMENTS:
        for who in range(3):
            steps = Steps(problem, moment, who, ValueError("bad"))
            with pytest.raises(ValueError, match="bad"):
                problem.run(steps)
            steps.forget()


def test_what_a_run_was_given_is_let_go_when_it_is_over(several: torchstrategy.Strategy) -> None:
    given = Held()
    alive = weakref.ref(given)
    several.run(lambda held: reduce(), args=(given,))
    del given
    gc.collect()
    assert alive() is None


# What others do meanwhile


HOOKS = pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])


@HOOKS
def test_a_strategy_may_be_collected_while_an_optimizer_steps(register: Callable[..., Any]) -> None:
    # The collector runs when it likes, so also while torch goes through the hooks that it has for all optimizers.
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
def test_another_threads_strategy_does_not_disturb_an_optimizer_that_steps(register: Callable[..., Any]) -> None:
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


# Ctrl-C


class CtrlC:
    """For the length of a block, pressing it raises KeyboardInterrupt in the main thread, `times` times.

    It is pressed again and again, since a main thread that is just about to wait may miss a signal.
    """

    def __init__(self, times: int = 1) -> None:
        self._left = times
        self._pressed, self._over = threading.Event(), threading.Event()
        self._finger = threading.Thread(target=self._keep_pressing)

    def press(self) -> None:
        self._pressed.set()

    def _keep_pressing(self) -> None:
        self._pressed.wait()
        while not self._over.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _handle(self, *_: object) -> None:
        if self._left:
            self._left -= 1
            raise KeyboardInterrupt

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._finger.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left = 0
        self._over.set()
        self._pressed.set()
        self._finger.join()
        signal.signal(signal.SIGINT, self._before)


@needs_signals
@interrupts_finalizers
@pytest.mark.parametrize("who", ["first", "last"])
def test_ctrl_c_stops_a_replica_that_computes_and_those_that_wait(several: torchstrategy.Strategy, who: str) -> None:
    problem = Problem(several)
    before = problem.state()
    count = several.num_replicas_in_sync
    loops = 0 if who == "first" else count - 1
    began, ended = [], []

    def step(inputs: torch.Tensor) -> None:
        began.append(replica())
        try:
            problem.optimizer.zero_grad()
            problem.model(inputs).square().mean().backward()
            if replica() == loops:
                ctrl_c.press()
                while True:
                    pass
            reduce()
        finally:
            ended.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        problem.run(step)
    assert began == list(range(loops + 1)) or not share_a_place(several)
    assert sorted(ended) == sorted(began)
    assert_same(problem.state(), before)
    problem.train()


@needs_signals
@interrupts_finalizers
def test_ctrl_c_after_a_meeting_stops_also_those_that_have_not_gone_on(several: torchstrategy.Strategy) -> None:
    began, ended = [], []

    def step() -> None:
        began.append(replica())
        try:
            reduce()
            ctrl_c.press()
            while True:
                pass
        finally:
            ended.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        several.run(step)
    assert sorted(ended) == sorted(began)
    several.run(reduce)


@needs_signals
def test_ctrl_c_lets_replicas_that_wait_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_threads, "_PATIENCE_S", HANG)
    strategy = central_in_one_place(3)
    threads, cleaned_up = [], []

    def step() -> None:
        threads.append(threading.current_thread())
        if replica() == 2:
            ctrl_c.press()
            while len(cleaned_up) < 2:
                pass
            return
        try:
            reduce()
        finally:
            if replica() == 1:
                threads[0].join()
                for _ in range(1_000_000):  # there is time to interrupt it, if somebody did
                    pass
            cleaned_up.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert cleaned_up == [0, 1]


@needs_signals
def test_ctrl_c_in_a_merge_function_stops_all_replicas(several: torchstrategy.Strategy) -> None:
    ended = []

    def merged(strategy: torchstrategy.Strategy) -> None:
        ctrl_c.press()
        while True:
            pass

    def step() -> None:
        try:
            torchstrategy.get_replica_context().merge_call(merged)
        finally:
            ended.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        several.run(step)
    assert sorted(ended) == list(range(several.num_replicas_in_sync))
    several.run(reduce)


@needs_signals
def test_a_second_ctrl_c_returns_while_a_replica_is_stuck() -> None:
    problem = Problem(torchstrategy.CentralStorageStrategy(["cpu"] * 2))
    before = problem.state()
    let_go, ended = threading.Event(), threading.Event()

    def step(inputs: torch.Tensor) -> None:
        problem.model(inputs).square().mean().backward()
        if replica() == 0:
            reduce()
        ctrl_c.press()
        try:
            let_go.wait(30)
        finally:
            ended.set()

    with CtrlC(times=2) as ctrl_c, pytest.raises(KeyboardInterrupt):
        problem.run(step)
    assert not ended.is_set()
    assert_same(problem.state(), before)
    problem.train()
    trained = problem.state()
    let_go.set()
    assert ended.wait(10), "the replica that was stuck has not gone on"
    assert_same(problem.state(), trained)
