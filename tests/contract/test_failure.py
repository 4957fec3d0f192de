"""What comes out of a run in which a replica fails, and that the state is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from failures import MOMENTS, Problem, Steps, assert_same, replica
from problems import close, in_pieces

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure")


class TwoArguments(Exception):
    """Cannot be made again from its text."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)


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


@pytest.mark.parametrize(
    "moment", ["at the beginning", "in backward", "after a merge call"]
)
def test_a_note_names_the_replica_and_its_device(
    several: torchstrategy.Strategy, moment: str
) -> None:
    count, error = several.num_replicas_in_sync, ValueError("bad")
    steps = Steps(Problem(several), moment, count - 1, error)
    with pytest.raises(ValueError, match="bad"):
        steps.problem.run(steps)
    (note,) = error.__notes__
    assert f"replica {count - 1} of {count}" in note
    assert str(several.extended.worker_devices[count - 1]) in note


def test_an_error_that_is_raised_at_every_step_collects_one_note(
    several: torchstrategy.Strategy,
) -> None:
    error = ValueError("bad")
    steps = Steps(Problem(several), "in forward", 0, error)
    for _ in range(3):
        with pytest.raises(ValueError, match="bad"):
            steps.problem.run(steps)
    assert len(error.__notes__) == 1


def test_an_error_that_refuses_attributes_comes_out_all_the_same(
    several: torchstrategy.Strategy,
) -> None:
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


def test_an_error_keeps_its_traceback_and_its_cause(
    several: torchstrategy.Strategy,
) -> None:
    cause = KeyError("cause")

    def the_line_to_look_at() -> None:
        raise ValueError("bad") from cause

    with pytest.raises(ValueError, match="bad") as caught:
        several.run(the_line_to_look_at)
    assert caught.value.__cause__ is cause
    assert caught.traceback[-1].name == "the_line_to_look_at"


def test_replicas_whose_turn_has_not_come_do_not_begin(
    in_one_place: torchstrategy.Strategy,
) -> None:
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


@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize(
    ("moment", "clears"),
    [
        pytest.param(
            moment, clears, id=f"{moment}-{'clearing' if clears else 'accumulating'}"
        )
        for moment in MOMENTS
        for clears in (True, False)
        if clears or moment != "after clearing"
    ],
)
def test_a_failure_before_an_update_leaves_everything_as_it_was(
    three: torchstrategy.Strategy, moment: str, who: str, clears: bool
) -> None:
    problem = Problem(three)
    before = problem.state()
    assert before["first.weight.grad"] is not None
    assert before["first.weight.momentum_buffer"] is not None
    steps = Steps(
        problem,
        moment,
        0 if who == "first" else three.num_replicas_in_sync - 1,
        ValueError("bad"),
        clears,
    )
    with pytest.raises(ValueError, match="bad"):
        problem.run(steps)
    assert sorted(steps.left) == sorted(steps.entered), "a replica is still in the step"
    assert_same(problem.state(), before)


@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_failure_training_goes_on_as_if_it_had_not_been(
    three: torchstrategy.Strategy, moment: str
) -> None:
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


def test_gradients_that_were_none_are_none_after_a_failure(
    several: torchstrategy.Strategy,
) -> None:
    problem = Problem(several)
    problem.optimizer.zero_grad()
    with pytest.raises(ValueError, match="bad"):
        problem.run(Steps(problem, "after clipping", 0, ValueError("bad")))
    assert all(parameter.grad is None for parameter in problem.model.parameters())


@pytest.mark.parametrize(
    "way",
    [
        "grad_to_none",
        "grad_zero_",
        "set_to_none_false",
        "module_zero_grad",
        "grad_scaled",
    ],
)
def test_however_gradients_were_cleared_a_failure_brings_them_back(
    three: torchstrategy.Strategy, way: str
) -> None:
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
            assert torch.equal(
                state[f"{name}.momentum_buffer"], expected[f"{name}.momentum_buffer"]
            )
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
                self.state[parameter]["steps"] = (
                    self.state[parameter].get("steps", 0) + 1
                )


@pytest.mark.parametrize(
    "replaces_gradients", [False, True], ids=["writes gradients", "replaces gradients"]
)
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


def test_a_buffer_that_cannot_be_brought_back_leaves_everything_as_it_was(
    several: torchstrategy.Strategy,
) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("history", torch.zeros(1))
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            replica = torchstrategy.get_replica_context().replica_id_in_sync_group
            self.history = torch.cat([self.history, torch.ones(1 + replica)])
            return self.norm(inputs)

    with several.scope():
        model = Grows()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="history"):
        several.run(lambda: model(torch.randn(4, 3)).sum().backward())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())
